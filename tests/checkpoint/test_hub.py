"""Fetching from and publishing on the Hub: real requests of huggingface_hub, to a server on this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from keras_qwen.checkpoint import hub
from keras_qwen.checkpoint.file_names import COMPANION_FILES, TOKENIZER_FILES

from .fake_hub import SHARDED, SHARDS, SINGLE, SMALL, names, serve


@pytest.fixture(autouse=True)
def server(tmp_path, monkeypatch):
    yield from serve(tmp_path, monkeypatch)


# Which files are fetched.


def test_single_file(server):
    repository = server.add("Qwen/small", SINGLE)
    folder = hub.resolve("Qwen/small", "model")
    assert folder.name == repository.branches["main"]
    assert server.fetched() == names(folder) == sorted([*SMALL, "model.safetensors"])
    assert {name: (folder / name).read_bytes() for name in names(folder)} == {n: SINGLE[n] for n in names(folder)}
    server.requests.clear()
    assert hub.resolve("Qwen/small", "model") == folder
    assert server.requests == ["GET /api/models/Qwen/small/revision/main"]


@pytest.mark.parametrize("more", [{}, {"model.safetensors": b"the same weights again"}])
def test_sharded(server, more):
    server.add("Qwen/large", {**SHARDED, **more})
    folder = hub.resolve("Qwen/large", "model")
    assert server.fetched() == names(folder) == sorted([*SMALL, "model.safetensors.index.json", *SHARDS])
    assert (folder / SHARDS[1]).read_bytes() == b"second"


def test_index_may_name_files_like_patterns(server):
    index = json.dumps({"weight_map": {"a": "[m]*.safetensors"}}).encode()
    files = {
        "config.json": b"{}",
        "model.safetensors.index.json": index,
        "[m]*.safetensors": b"1",
        "m.safetensors": b"",
    }
    server.add("Qwen/odd", files)
    assert names(hub.resolve("Qwen/odd", "model")) == sorted(set(files) - {"m.safetensors"})


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("config", ["config.json"]),
        ("tokenizer", sorted(set(SMALL) & set(TOKENIZER_FILES))),
        ("adapter", ["adapter_config.json", "adapter_model.safetensors"]),
    ],
)
def test_only_what_is_asked_for(server, what, expected):
    adapter = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"1", "adapter_model.bin": b"2"}
    server.add("me/both", {**SINGLE, **adapter})
    folder = hub.resolve("me/both", what)
    assert server.fetched() == names(folder) == expected


def test_old_tokenizer_files_suffice(server):
    server.add("Qwen/old", {"vocab.json": b"{}", "merges.txt": b""})
    assert names(hub.resolve("Qwen/old", "tokenizer")) == ["merges.txt", "vocab.json"]


def test_id_without_organisation(server):
    server.add("small", SINGLE)
    assert names(hub.resolve("small", "config")) == ["config.json"]


def test_companions_are_the_tokenizer_files_and_generation_config():
    assert set(COMPANION_FILES) == {"generation_config.json", *TOKENIZER_FILES}
    assert set(SMALL) - {"config.json"} <= set(COMPANION_FILES)


# Revisions.


def test_revision(server):
    repository = server.add("Qwen/small", SINGLE)
    first = repository.branches["main"]
    second = repository.commit({**SINGLE, "config.json": b"new"})
    other = repository.commit({**SINGLE, "config.json": b"other"}, branch="feature/x")
    for revision, commit in [(None, second), ("main", second), (first, first), ("feature/x", other)]:
        folder = hub.resolve("Qwen/small", "model", revision=revision)
        assert folder.name == commit
        assert (folder / "config.json").read_bytes() == repository.commits[commit]["config.json"]
    assert server.fetched().count("model.safetensors") == 1  # unchanged files are shared in the cache


def test_all_files_are_of_one_commit(server, monkeypatch):
    repository = server.add("Qwen/large", SHARDED)
    read_index = hub.read_index

    def meanwhile(path):
        repository.commit({**SHARDED, **dict.fromkeys(SHARDS, b"new")})
        return read_index(path)

    monkeypatch.setattr(hub, "read_index", meanwhile)
    folder = hub.resolve("Qwen/large", "model")
    assert [(folder / name).read_bytes() for name in SHARDS] == [b"first", b"second"]


# Without the network.


def go_offline(server, way, monkeypatch):
    """Options for `resolve`, and what an error has to advise."""
    if way == "option":
        return {"local_files_only": True}, "local_files_only=False"
    if way == "variable":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        return {}, "unset HF_HUB_OFFLINE"
    server.stop()
    return {}, "check the connection"


WAYS = pytest.mark.parametrize("way", ["option", "variable", "outage"])


@WAYS
@pytest.mark.parametrize("files", [SINGLE, SHARDED], ids=["single", "sharded"])
def test_offline_from_the_cache(server, way, files, monkeypatch):
    server.add("Qwen/small", files)
    folder = hub.resolve("Qwen/small", "model")
    server.requests.clear()
    options, _ = go_offline(server, way, monkeypatch)
    assert hub.resolve("Qwen/small", "model", **options) == folder
    assert hub.resolve("Qwen/small", "tokenizer", revision=folder.name, **options) == folder
    assert server.requests == []


@WAYS
def test_offline_without_cache(server, way, monkeypatch):
    options, advice = go_offline(server, way, monkeypatch)
    with pytest.raises(OSError, match=rf"Qwen/small is not in the cache.*{advice}"):
        hub.resolve("Qwen/small", "model", **options)


@WAYS
def test_offline_with_half_a_cache(server, way, monkeypatch):
    server.add("Qwen/small", SINGLE)
    hub.resolve("Qwen/small", "config")
    options, advice = go_offline(server, way, monkeypatch)
    with pytest.raises(OSError, match=rf"Qwen/small.*{advice}"):
        hub.resolve("Qwen/small", "model", **options)


def test_offline_with_a_cache_of_single_files(server):
    server.add("Qwen/small", SINGLE)
    huggingface_hub.hf_hub_download("Qwen/small", "config.json")  # as transformers does: no list of the files is kept
    with pytest.raises(OSError, match=r"model.safetensors of Qwen/small .* not in the cache: .*local_files_only=False"):
        hub.resolve("Qwen/small", "model", local_files_only=True)
    huggingface_hub.hf_hub_download("Qwen/small", "model.safetensors")
    assert names(hub.resolve("Qwen/small", "model", local_files_only=True)) == ["config.json", "model.safetensors"]


def test_cache_dir(server, tmp_path):
    server.add("Qwen/small", SINGLE)
    folder = hub.resolve("Qwen/small", "model", cache_dir=tmp_path / "elsewhere")
    assert folder.is_relative_to(tmp_path / "elsewhere") and not (tmp_path / "cache").exists()
    assert hub.resolve("Qwen/small", "model", cache_dir=tmp_path / "elsewhere", local_files_only=True) == folder


def test_environment_variables(server, tmp_path):
    server.add("me/closed", SINGLE, token="hf_read")
    # Not through keras_qwen/__init__.py, which takes seconds and is not what is tested.
    code = """if True:
        import sys, types
        package = types.ModuleType("keras_qwen")
        package.__path__ = [sys.argv[1]]
        sys.modules["keras_qwen"] = package
        from keras_qwen.checkpoint import hub
        assert "huggingface_hub" not in sys.modules
        hub.resolve(".", "model")
        assert "huggingface_hub" not in sys.modules
        print(hub.resolve("me/closed", "model"))
    """
    environment = {"HF_ENDPOINT": server.address, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "hf_read"}

    def run(**more):
        return subprocess.run(
            [sys.executable, "-W", "error", "-c", code, str(Path(hub.__file__).parents[1])],
            env={**os.environ, **environment, **more},
            capture_output=True,
            text=True,
            check=False,
        )

    online = run()
    assert online.stdout.startswith(str(tmp_path / "home")), online.stderr
    server.stop()
    offline = run(HF_HUB_OFFLINE="1")
    assert offline.stdout == online.stdout, offline.stderr


# Interrupted downloads.


def test_broken_connection_is_resumed(server):
    weights = bytes(range(256)) * 50_000  # huggingface_hub writes 10 MB at a time
    server.add("Qwen/small", {**SINGLE, "model.safetensors": weights})
    server.broken["model.safetensors"] = 12_000_000
    folder = hub.resolve("Qwen/small", "model")
    assert (folder / "model.safetensors").read_bytes() == weights
    (wanted,) = [wanted for wanted in server.ranges if wanted]
    assert 0 < int(wanted.removeprefix("bytes=").removesuffix("-")) <= 12_000_000


def test_second_call_fetches_only_what_is_missing(server):
    server.add("Qwen/large", SHARDED)
    server.broken[SHARDS[1]] = -1
    with pytest.raises(OSError, match=r"Qwen/large .*call again") as caught:
        hub.resolve("Qwen/large", "model")
    assert isinstance(caught.value.__cause__, huggingface_hub.errors.HfHubHTTPError)
    del server.broken[SHARDS[1]]
    server.requests.clear()
    folder = hub.resolve("Qwen/large", "model")
    assert server.fetched()[-1] == SHARDS[1] and set(server.fetched()) <= set(SHARDS)
    assert [(folder / name).read_bytes() for name in SHARDS] == [b"first", b"second"]
