"""What the tests of the shell share: a way to run it in this process, and a tiny model with a tokenizer."""

import shutil

import pytest
from typer.testing import CliRunner

import keras_qwen as kq
from keras_qwen.cli.app import app

TEXTS = ["The sun warms the sea.", "Salt makes the sea heavy.", "user assistant system"] * 3


@pytest.fixture
def shell():
    """Runs `keras-qwen` with some arguments; the result has `exit_code`, `stdout`, `stderr`."""

    def run(*arguments, stdin=""):
        result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A tiny model with random weights and a tokenizer, on disk."""
    folder = tmp_path_factory.mktemp("cli") / "tiny"
    tokenizer = kq.QwenTokenizer.train(TEXTS, vocab_size=300)
    config = kq.QwenConfig(
        model_type="qwen3",
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        extra={"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id},
    )
    kq.QwenCausalLM(config).save_pretrained(folder, tokenizer=tokenizer)
    return folder


@pytest.fixture
def copied(tmp_path, reference_folder):
    """A function that copies a reference checkpoint, for a test to damage."""

    def copy(name):
        folder = tmp_path / name.replace("/", "-")
        shutil.copytree(reference_folder(name), folder)
        return folder

    return copy
