"""Publishing on the Hub: one commit, and nothing stale beside it."""

import tempfile

import pytest
from huggingface_hub import constants

from keras_qwen.checkpoint import hub

from .fake_hub import CLUTTER, SHARDED, SINGLE, SMALL, names, serve


@pytest.fixture(autouse=True)
def server(tmp_path, monkeypatch):
    yield from serve(tmp_path, monkeypatch)


def saver(files):
    def save(folder):
        for name, content in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)

    return save


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.mark.parametrize("private", [True, None])
def test_push_creates_the_repository(server, temporary, private):
    files = {**SMALL, "model.safetensors": b"trained", "extra/notes.txt": b"more"}
    address = hub.push(saver(files), "me/mine", token="hf_write", private=private, commit_message="First try")
    repository = server.repositories["me/mine"]
    commit = repository.branches["main"]
    assert address == f"{server.address}/me/mine/commit/{commit}"
    assert repository.private is private
    assert repository.messages == ["First try"] and len(repository.commits) == 2
    assert repository.commits[commit] == {".gitattributes": b"", **files}
    assert names(temporary) == []
    assert (hub.resolve("me/mine", "model") / "model.safetensors").read_bytes() == b"trained"


def test_push_of_an_id_without_organisation(server, temporary):
    assert "/me/mine/commit/" in hub.push(saver(SMALL), "mine", token="hf_write")
    assert "config.json" in server.repositories["me/mine"].commits[server.repositories["me/mine"].branches["main"]]


def test_push_replaces_the_old_checkpoint(server, temporary):
    repository = server.add("me/mine", {**SHARDED, "adapter_model.safetensors": b"stays"})
    new = {"config.json": b"new", "model.safetensors": b"new", "tokenizer.json": b"new"}
    hub.push(saver(new), "me/mine", token="hf_write")
    kept = {**CLUTTER, "adapter_model.safetensors": b"stays", "generation_config.json": b"{}"}
    assert repository.commits[repository.branches["main"]] == {**kept, **new}
    assert len(repository.commits) == 2
    adapter = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"new"}
    hub.push(saver(adapter), "me/mine", token="hf_write")
    assert repository.commits[repository.branches["main"]] == {**kept, **new, **adapter}


def test_push_to_a_branch(server, temporary):
    repository = server.add("me/mine", SINGLE)
    main = repository.branches["main"]
    for content in (b"once", b"twice"):
        hub.push(saver({"config.json": content}), "me/mine", token="hf_write", revision="trial")
        assert repository.commits[repository.branches["trial"]] == {**SINGLE, "config.json": content}
    assert repository.branches["main"] == main


def test_push_of_the_same_again_makes_no_commit(server, temporary):
    hub.push(saver(SMALL), "me/mine", token="hf_write")
    repository = server.repositories["me/mine"]
    assert hub.push(saver(SMALL), "me/mine", token="hf_write").endswith(repository.branches["main"])
    assert len(repository.commits) == 2


@pytest.mark.parametrize("token", [None, "hf_read"])
def test_push_without_the_right(server, temporary, token):
    with pytest.raises(OSError, match=r"no access to me/mine.*token=.*write"):
        hub.push(saver(SMALL), "me/mine", token=token)
    assert names(temporary) == [] and server.repositories == {}


def test_push_offline(temporary, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match=r"me/mine.*HF_HUB_OFFLINE"):
        hub.push(saver(SMALL), "me/mine", token="hf_write")


def test_push_passes_on_what_save_raises(server, temporary):
    def save(folder):
        (folder / "model.safetensors").write_bytes(b"half")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match=r"disk full"):
        hub.push(save, "me/mine", token="hf_write")
    assert names(temporary) == [] and server.requests == []
