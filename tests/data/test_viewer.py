"""What show_tokens makes visible."""

import pytest

from keras_qwen.data import encode_chat, pack, show_tokens
from keras_qwen.tokenizer import QwenTokenizer

CHAT = [{"role": "user", "content": "<b>\t猫\u202e"}, {"role": "assistant", "content": "a & 🙂"}]


@pytest.fixture(scope="module")
def tokenizer():
    return QwenTokenizer.train(["user assistant"], 280)


@pytest.fixture(scope="module")
def example(tokenizer):
    return encode_chat(tokenizer, CHAT)


def test_plain_text(tokenizer, example):
    text = str(show_tokens(example, tokenizer))
    assert "⟦a & 🙂<|im_end|>⟧↵\n" in text
    assert "<|im_start|>user↵\n<b>⇥\t猫\\u202e<|im_end|>↵\n" in text
    assert f"{sum(example['assistant_mask'])} of {len(example['token_ids'])} tokens are trained on" in text


def test_colours_in_a_terminal(tokenizer, example, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    text = str(show_tokens(example, tokenizer))
    assert "\x1b[" in text and "⟦" not in text
    trained = [part for part in text.split("\x1b[") if ";42m" in part]
    assert "".join(part.partition("m")[2] for part in trained) == "a & 🙂<|im_end|>"


def test_html_is_escaped(tokenizer, example):
    page = show_tokens(example, tokenizer)._repr_html_()
    assert "&lt;" in page and "&amp;" in page and "<b>" not in page and "\u202e" not in page
    assert page.count("background:#2e9e5b") == sum(example["assistant_mask"]) - 3  # 🙂 is four tokens


def test_a_row_of_a_batch(tokenizer, example):
    other = encode_chat(tokenizer, [{"role": "user", "content": "q"}, {"role": "assistant", "content": "b"}])
    packed = pack([example, other], 200)
    text = str(show_tokens(packed, tokenizer))
    assert "⟦a & 🙂<|im_end|>⟧↵\n" in text and "⟦b<|im_end|>⟧↵\n" in text


def test_anything_else_is_refused(tokenizer):
    with pytest.raises(ValueError, match="show_tokens takes what encode_chat returns"):
        show_tokens("hello", tokenizer)
