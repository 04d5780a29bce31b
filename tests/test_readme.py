"""The README's code runs as it stands there, on a tiny model."""

import dataclasses
import json
import re
from pathlib import Path

import keras
import pytest

import keras_qwen as kq
from keras_qwen.demo.recipe import FROM_SCRATCH, small_model

README = (Path(__file__).parent.parent / "README.md").read_text()
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
SETTINGS = dataclasses.replace(FROM_SCRATCH, vocab_size=300, hidden_size=64, num_hidden_layers=1, max_length=1024)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with chats.jsonl and a model `tiny`."""
    monkeypatch.chdir(tmp_path)
    turns = [{"role": "user", "content": "Say one."}, {"role": "assistant", "content": "One, then."}]
    Path("chats.jsonl").write_text("\n".join(json.dumps({"messages": turns * (1 + n % 3)}) for n in range(60)))
    tokenizer, model = small_model(Path("chats.jsonl"), SETTINGS)
    model.save_pretrained("tiny", tokenizer=tokenizer)
    return tmp_path


def test_twenty_lines_of_real_use(folder, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(code.strip().splitlines()) <= 22
    names = {}
    exec(compile(code.replace(MODEL, "tiny"), "README.md", "exec"), names)
    assert "tokens" in capsys.readouterr().out
    trained = kq.QwenCausalLM.from_pretrained("my-qwen", dtype="float32")
    before = kq.QwenCausalLM.from_pretrained("tiny", dtype="float32")
    moved = keras.ops.norm(trained.backbone.embed_tokens.embeddings - before.backbone.embed_tokens.embeddings)
    assert float(moved) > 0


def test_commands_and_notebooks_exist():
    makefile = (Path(__file__).parent.parent / "Makefile").read_text()
    for target in set(re.findall(r"make ([a-z-]+)", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    (listed,) = re.findall(r"Notebooks,.*?:\s(.*?)\.\n", README, re.DOTALL)
    notebooks = {path.stem for path in (Path(__file__).parent.parent / "notebooks").glob("*.ipynb")}
    assert set(re.findall(r"`(\w+)`", listed)) == notebooks
