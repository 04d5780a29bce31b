"""Reading a tokenizer from its files in each of their forms, and writing them back."""

import json
import sys
import types

import pytest

from keras_qwen import checkpoint
from keras_qwen.tokenizer import QwenTokenizer

CHAT = [{"role": "user", "content": "sea"}]
DECODER = "added_tokens_decoder"


@pytest.fixture(scope="module")
def trained():
    return QwenTokenizer.train(["The sea is warm.", "The sun warms the sea."], 265)


@pytest.fixture
def folder(trained, tmp_path):
    trained.save_pretrained(tmp_path / "source")
    return tmp_path / "source"


@pytest.fixture
def old_folder(trained, folder):
    """The same tokenizer as vocab.json and merges.txt."""
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    lines = ["#version: 0.2", *(" ".join(merge) for merge in model["merges"])]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n")
    (folder / "tokenizer.json").unlink()
    return folder


def change_config(folder, remove=(), **values):
    path = folder / "tokenizer_config.json"
    config = {key: value for key, value in json.loads(path.read_text()).items() if key not in remove}
    path.write_text(json.dumps(config | values))


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def assert_same(tokenizer, other):
    text = "The sun<|im_end|>\nwarms é 猫 <|endoftext|>"
    assert tokenizer.encode(text) == other.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.special_token_ids == other.special_token_ids
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (other.eos_token_id, other.pad_token_id)
    assert tokenizer.apply_chat_template(CHAT) == other.apply_chat_template(CHAT)


def test_tokenizer_json(trained, folder):
    assert_same(QwenTokenizer.from_pretrained(folder), trained)
    assert_same(QwenTokenizer.from_pretrained(str(folder)), trained)


def test_vocab_json_and_merges_txt(trained, old_folder):
    assert_same(QwenTokenizer.from_pretrained(old_folder), trained)


def test_added_tokens_json(trained, old_folder):
    change_config(old_folder, remove=[DECODER])
    (old_folder / "special_tokens_map.json").write_text('{"additional_special_tokens": ["<|im_start|>"]}')
    added = {"<|endoftext|>": 262, "<|im_start|>": 263, "<|im_end|>": 264, "<plain>": 265}
    (old_folder / "added_tokens.json").write_text(json.dumps(added))
    tokenizer = QwenTokenizer.from_pretrained(old_folder)
    assert_same(tokenizer, trained)
    assert tokenizer.encode("sea<plain>")[-1] == 265
    assert tokenizer.decode([265, 264], skip_special_tokens=True) == "<plain>"


def test_qwens_own_added_tokens_are_known(tmp_path):
    vocabulary = {f"token{i}": i for i in range(151643)}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = QwenTokenizer.from_pretrained(tmp_path)
    expected = {"<|endoftext|>": 151643, "<|im_end|>": 151645, "<tool_call>": 151657, "<|file_sep|>": 151664}
    assert {token: tokenizer.token_to_id(token) for token in expected} == expected
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 151643
    assert 151657 not in tokenizer.special_token_ids and 151664 in tokenizer.special_token_ids
    assert tokenizer.vocab_size == 151665


def test_other_vocabularies_have_to_declare_theirs(old_folder):
    change_config(old_folder, remove=[DECODER])
    with pytest.raises(ValueError, match=r"vocab.json is not Qwen's.*added_tokens_decoder"):
        QwenTokenizer.from_pretrained(old_folder)


def test_tokens_that_only_the_config_declares_are_added(folder):
    declared = json.loads((folder / "tokenizer_config.json").read_text())[DECODER]
    change_config(folder, **{DECODER: declared | {"265": {"content": "<think>", "special": False}}})
    assert QwenTokenizer.from_pretrained(folder).encode("<think>") == [265]


@pytest.mark.parametrize("fixture", ["folder", "old_folder"])
def test_declared_ids_have_to_be_the_ids(fixture, request):
    folder = request.getfixturevalue(fixture)
    change_config(folder, **{DECODER: {"263": {"content": "<|im_end|>", "special": True}}})
    with pytest.raises(ValueError, match=r"'<\|im_end\|>' is declared with id 263"):
        QwenTokenizer.from_pretrained(folder)


def test_special_tokens_in_every_notation(folder):
    change_config(
        folder,
        remove=["bos_token", "eos_token", "pad_token"],
        bos_token={"__type": "AddedToken", "content": "<|im_start|>", "special": True},
        pad_token=None,
    )
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>"}')
    tokenizer = QwenTokenizer.from_pretrained(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (263, 264, None)


def test_a_missing_config_means_qwens_defaults(folder):
    (folder / "tokenizer_config.json").unlink()
    tokenizer = QwenTokenizer.from_pretrained(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (None, 262, 262)
    assert tokenizer.chat_template is None


def test_settings_of_the_last_use_are_dropped(trained, folder):
    settings = json.loads((folder / "tokenizer.json").read_text())
    settings["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    settings["padding"] = {
        "strategy": {"Fixed": 99},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "!",
    }
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    assert_same(QwenTokenizer.from_pretrained(folder), trained)


def test_files_are_carried_over_byte_for_byte(folder, tmp_path):
    config = (folder / "tokenizer_config.json").read_text()
    (folder / "tokenizer_config.json").write_text("\n\n" + config.replace(": ", " :   "))
    (folder / "chat_template.jinja").write_bytes(b"{{ messages | length }}\r\n")
    (folder / "special_tokens_map.json").write_text("{ }")
    original = contents(folder)
    tokenizer = QwenTokenizer.from_pretrained(folder)
    tokenizer.save_pretrained(tmp_path / "deep" / "copy")
    assert contents(tmp_path / "deep" / "copy") == original
    tokenizer.save_pretrained(folder)
    assert contents(folder) == original


def test_the_source_may_be_gone_when_saving(folder, tmp_path):
    tokenizer = QwenTokenizer.from_pretrained(folder)
    original = contents(folder)
    for path in folder.iterdir():
        path.unlink()
    tokenizer.save_pretrained(tmp_path / "copy")
    assert contents(tmp_path / "copy") == original


def test_saving_replaces_another_tokenizer_alone(folder, tmp_path):
    (tmp_path / "model.safetensors").write_text("weights")
    (tmp_path / "chat_template.jinja").write_text("another")
    QwenTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    assert not (tmp_path / "chat_template.jinja").exists()
    assert (tmp_path / "model.safetensors").read_text() == "weights"


def test_a_file_that_cannot_be_written_leaves_the_old_one(folder, monkeypatch):
    tokenizer = QwenTokenizer.from_pretrained(folder)
    original = contents(folder)
    tokenizer.chat_template = "changed"

    def full_disk(path, content):
        with path.open("wb") as file:
            file.write(content[:10])
        raise OSError("No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full_disk)
    with pytest.raises(OSError, match="No space left"):
        tokenizer.save_pretrained(folder)
    assert contents(folder) == original


class TestChatTemplate:
    def test_chat_template_jinja_wins(self, folder):
        change_config(folder, chat_template="from the config")
        assert QwenTokenizer.from_pretrained(folder).chat_template == "from the config"
        (folder / "chat_template.jinja").write_text("from the file: é", encoding="utf-8")
        assert QwenTokenizer.from_pretrained(folder).chat_template == "from the file: é"

    def test_named_templates(self, folder):
        named = [
            {"name": "default", "template": "plain"},
            {"name": "tool_use", "template": "{{ tools | length }} tool"},
        ]
        change_config(folder, chat_template=named)
        tokenizer = QwenTokenizer.from_pretrained(folder)
        assert tokenizer.chat_template == "plain"
        assert tokenizer.apply_chat_template(CHAT, tokenize=False) == "plain"
        assert tokenizer.apply_chat_template(CHAT, tools=[{"type": "function"}], tokenize=False) == "1 tool"
        tokenizer.chat_template = "replaced"
        assert tokenizer.apply_chat_template(CHAT, tools=[{"type": "function"}], tokenize=False) == "replaced"

    @pytest.mark.parametrize("in_config", [True, False])
    @pytest.mark.parametrize("in_file", [True, False])
    def test_a_replaced_template_takes_the_old_ones_place(self, folder, tmp_path, in_config, in_file):
        change_config(folder, remove=["chat_template"], kept="as it was")
        if in_config:
            change_config(folder, chat_template="old config")
        if in_file:
            (folder / "chat_template.jinja").write_text("old file")
        tokenizer = QwenTokenizer.from_pretrained(folder)
        tokenizer.chat_template = "nëw"
        tokenizer.save_pretrained(tmp_path / "copy")
        config = json.loads((tmp_path / "copy" / "tokenizer_config.json").read_bytes())
        assert config["kept"] == "as it was"
        # Readers that know only one of the places find no old template there.
        assert config.get("chat_template") == ("nëw" if in_config or not in_file else None)
        assert (tmp_path / "copy" / "chat_template.jinja").exists() == in_file
        assert QwenTokenizer.from_pretrained(tmp_path / "copy").chat_template == "nëw"
        assert contents(tmp_path / "copy")["tokenizer.json"] == contents(folder)["tokenizer.json"]

    @pytest.mark.parametrize("in_file", [True, False])
    def test_a_removed_template_is_gone(self, folder, tmp_path, in_file):
        if in_file:
            (folder / "chat_template.jinja").write_text("old file")
        tokenizer = QwenTokenizer.from_pretrained(folder)
        tokenizer.chat_template = None
        tokenizer.save_pretrained(tmp_path / "copy")
        assert QwenTokenizer.from_pretrained(tmp_path / "copy").chat_template is None


def test_a_built_tokenizer_saves_its_settings(trained, folder):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "Qwen2Tokenizer"
    assert (config["eos_token"], config["pad_token"], config["bos_token"]) == ("<|im_end|>", "<|endoftext|>", None)
    assert config["chat_template"] == trained.chat_template
    assert config[DECODER]["264"]["content"] == "<|im_end|>" and config[DECODER]["264"]["special"] is True


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{}", "tokenizer.json is not a tokenizer"),
        ("tokenizer.json", '{"version": "1.0", "trunc', "tokenizer.json is not a tokenizer"),
        ("tokenizer_config.json", "{nothing", "tokenizer_config.json is not valid JSON"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json must hold a JSON object"),
        ("chat_template.jinja", b"\xff\xfe", "chat_template.jinja is not UTF-8"),
    ],
)
def test_broken_files_are_named(folder, name, content, message):
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message) as error:
        QwenTokenizer.from_pretrained(folder)
    assert str(folder) in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("merges.txt", "#version: 0.2\na b c\n", "merges.txt: 'a b c' is not two tokens"),
        ("merges.txt", "x zzz\n", "merges.txt merges .*'zzz'.* which vocab.json lacks"),
        ("vocab.json", '{"a": "0"}', "vocab.json.*'a'"),
    ],
)
def test_broken_old_files_are_named(old_folder, name, content, message):
    (old_folder / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        QwenTokenizer.from_pretrained(old_folder)


@pytest.mark.parametrize("present", [[], ["vocab.json"], ["merges.txt", "tokenizer_config.json"]])
def test_a_folder_without_a_tokenizer(tmp_path, present):
    for name in present:
        (tmp_path / name).write_text("{}")
    with pytest.raises(FileNotFoundError, match="put tokenizer.json there, or vocab.json and merges.txt"):
        QwenTokenizer.from_pretrained(tmp_path)


def test_hub_ids_are_resolved(trained, folder, monkeypatch):
    def resolve(source, *, what, **options):
        assert (source, what) == ("Qwen/Small", "tokenizer")
        assert options == dict(revision="v1", token="secret", cache_dir="cache", local_files_only=True)
        return folder

    hub = types.SimpleNamespace(resolve=resolve)
    monkeypatch.setitem(sys.modules, "keras_qwen.checkpoint.hub", hub)
    monkeypatch.setattr(checkpoint, "hub", hub, raising=False)
    tokenizer = QwenTokenizer.from_pretrained(
        "Qwen/Small", revision="v1", token="secret", cache_dir="cache", local_files_only=True
    )
    assert_same(tokenizer, trained)
