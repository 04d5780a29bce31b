"""What cannot be fetched from the Hub, and what is no Hub id: the errors."""

import json
from pathlib import Path

import huggingface_hub
import pytest

from keras_qwen.checkpoint import hub

from .fake_hub import SHARDED, SHARDS, SINGLE, names, serve


@pytest.fixture(autouse=True)
def server(tmp_path, monkeypatch):
    yield from serve(tmp_path, monkeypatch)


# What the Hub refuses.


@pytest.mark.parametrize("token", [None, "hf_other"])
def test_unknown_repository(token):
    with pytest.raises(OSError, match=r"Qwen/none is neither a folder nor a repository.*token=") as caught:
        hub.resolve("Qwen/none", "config", token=token)
    assert isinstance(caught.value.__cause__, huggingface_hub.errors.RepositoryNotFoundError)


def test_private_repository(server):
    server.add("me/closed", SINGLE, token="hf_read")
    with pytest.raises(OSError, match=r"me/closed is neither.*private.*token=.*hf auth login"):
        hub.resolve("me/closed", "config")
    assert names(hub.resolve("me/closed", "config", token="hf_read")) == ["config.json"]


@pytest.mark.parametrize("token", [None, "hf_other"])
def test_gated_repository(server, token):
    server.add("Qwen/gated", SINGLE, token="hf_read", gated=True)
    with pytest.raises(OSError, match=r"Qwen/gated is gated.*token=") as caught:
        hub.resolve("Qwen/gated", "model", token=token)
    assert isinstance(caught.value.__cause__, huggingface_hub.errors.GatedRepoError)
    assert "model.safetensors" in names(hub.resolve("Qwen/gated", "model", token="hf_read"))


@pytest.mark.parametrize("status", [401, 403])
def test_refused_token(server, status):
    server.refusal = status
    with pytest.raises(OSError, match=r"no access to Qwen/small.*token="):
        hub.resolve("Qwen/small", "config", token="hf_expired")


def test_no_stored_token(server):
    server.add("Qwen/small", SINGLE)
    with pytest.raises(OSError, match=r"no access to Qwen/small.*hf auth login"):
        hub.resolve("Qwen/small", "config", token=True)


@pytest.mark.parametrize("revision", ["v9", "0" * 40])
def test_unknown_revision(server, revision):
    server.add("Qwen/small", SINGLE)
    with pytest.raises(OSError, match=rf"Qwen/small has no revision '{revision}'"):
        hub.resolve("Qwen/small", "config", revision=revision)


@pytest.mark.parametrize(
    ("files", "what", "message"),
    [
        (["model.safetensors"], "config", r"has no config.json\.$"),
        (
            ["config.json", "pytorch_model.bin"],
            "model",
            r"has no model.safetensors\. It has pytorch_model.bin.*convert to saf",
        ),
        (["config.json"], "model", r"has no model.safetensors\.$"),
        (["adapter_config.json"], "model", r"has no config.json, model.safetensors\. It holds an adapter"),
        (["config.json", "model.safetensors"], "adapter", r"has no adapter_config.json, .*It holds a model"),
        (
            ["adapter_config.json", "adapter_model.bin"],
            "adapter",
            r"has no adapter_.*It has adapter_model.bin.*convert",
        ),
        (["config.json", "vocab.json"], "tokenizer", r"has no tokenizer.json"),
    ],
)
def test_missing_file(server, files, what, message):
    server.add("me/part", dict.fromkeys(files, b""))
    with pytest.raises(OSError, match=r"me/part \(commit \w{40}\) " + message):
        hub.resolve("me/part", what)
    assert [name for name in server.fetched() if name.endswith(".bin")] == []


def test_missing_shard(server):
    server.add("Qwen/large", {name: content for name, content in SHARDED.items() if name != SHARDS[1]})
    with pytest.raises(OSError, match=rf"Qwen/large .* has no {SHARDS[1]}"):
        hub.resolve("Qwen/large", "model")


@pytest.mark.parametrize("name", ["../x.safetensors", "/x.safetensors", "a/x.safetensors", "", "pytorch_model.bin"])
def test_index_must_name_weights_beside_it(server, name):
    index = json.dumps({"weight_map": {"a": name}}).encode()
    server.add("me/bad", {"config.json": b"{}", "model.safetensors.index.json": index, name or "x": b""})
    with pytest.raises(ValueError, match=name or "''"):
        hub.resolve("me/bad", "model")
    assert server.fetched() == ["config.json", "model.safetensors.index.json"]


@pytest.mark.parametrize("index", [b"{", b"[]", b'{"weight_map": {}}'])
def test_index_must_be_one(server, index):
    server.add("me/bad", {"config.json": b"{}", "model.safetensors.index.json": index})
    with pytest.raises(ValueError, match=r"model.safetensors.index.json"):
        hub.resolve("me/bad", "model")


# What is no Hub id.


@pytest.mark.parametrize("kind", [str, Path])
def test_folder(server, kind, tmp_path, monkeypatch):
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert hub.resolve(kind(tmp_path / "org"), "model") == tmp_path / "org"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for source in ("org/name", "./org", "org/", ".", "org"):
        assert hub.resolve(kind(source), "model") == Path(source)
    assert hub.resolve(kind("~/org"), "model") == tmp_path / "org"
    assert server.requests == []


@pytest.mark.parametrize(
    "source",
    ["/no/such", "/no", "./no", "../no", "~/no", "a/b/c", "no/", "a\\b", "https://hub/a/b", Path("no"), Path("a/b")],
)
def test_path_that_does_not_exist(server, source):
    with pytest.raises(OSError, match=r"no folder"):
        hub.resolve(source, "model")
    assert server.requests == []


def test_file_is_no_source(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(OSError, match=r"model.safetensors is a file; pass the folder"):
        hub.resolve(str(tmp_path / "model.safetensors"), "model")


@pytest.mark.parametrize("source", ["", "a b", "-a", "a--b", "a..b", "name.git", "a/b:c", "é", "a" * 97])
def test_bad_id(server, source):
    with pytest.raises(ValueError, match=r"neither a folder nor a Hub id") as caught:
        hub.resolve(source, "model")
    assert repr(source) in str(caught.value)
    with pytest.raises(ValueError, match=r"Hub id"):
        hub.push(lambda folder: pytest.fail("saved"), source)
    assert server.requests == []


def test_unknown_kind_of_files():
    with pytest.raises(ValueError, match=r"what='weights'.*config, tokenizer, model, adapter"):
        hub.resolve("Qwen/small", "weights")
