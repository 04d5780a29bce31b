"""What a row hands out while it grows, and where it ends."""

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_qwen import QwenTokenizer
from keras_qwen.generation.stopping import Continuation


@functools.cache
def tokenizer():
    return QwenTokenizer.train(["the cat sat on the mat, 深度学习 🙂 café naïve"] * 3, vocab_size=290)


def grow(ids, stop_ids=(), stop_strings=(), text=True):
    row = Continuation(frozenset(stop_ids), tuple(stop_strings), tokenizer(), text)
    pieces = []
    for token_id in ids:
        pieces.append(row.push(token_id))
        if row.done:
            break
    return [*pieces, row.finish()]


@settings(max_examples=200)
@given(
    st.lists(st.integers(0, 289), max_size=30),
    st.lists(st.sampled_from(["at", "the ", "深", "🙂 c", "a", "tt", "�"]), max_size=3),
)
def test_pieces_are_the_text_up_to_the_first_stop(ids, strings):
    text = tokenizer().decode(ids, skip_special_tokens=True)
    ends = [at for at in map(text.find, strings) if at >= 0]
    assert "".join(grow(ids, stop_strings=strings)) == text[: min(ends, default=len(text))]


@settings(max_examples=100)
@given(st.text(alphabet="ath é🙂深", max_size=20), st.sampled_from(["at", "🙂", "h é", "深深"]))
def test_ids_are_those_wholly_before_the_stop(text, string):
    ids = tokenizer().encode(text)
    kept = [token_id for piece in grow(ids, stop_strings=[string], text=False) for token_id in piece]
    text = tokenizer().decode(ids)
    assert kept == ids[: len(kept)]
    if string in text:
        assert text.startswith(tokenizer().decode(kept)) and len(tokenizer().decode(kept)) <= text.index(string)
    else:
        assert kept == ids


def test_no_piece_ends_within_a_character():
    ids = tokenizer().encode("é🙂深ü")
    pieces = grow(ids)
    assert "".join(pieces) == "é🙂深ü" and "�" not in "".join(pieces)
    assert grow(ids[:1] if len(ids) > 4 else ids)  # the rest of a broken character comes at the end


def test_only_what_may_become_a_stop_is_held_back():
    row = Continuation(frozenset(), ("stop!",), tokenizer(), True)
    pushed = [row.push(token_id) for letter in "a sto s" for token_id in tokenizer().encode(letter)]
    assert pushed == ["a", " ", "", "", "", "sto ", ""]
    assert row.finish() == "s" and row.done and row.push(1) == ""


def test_stop_ids():
    ids = tokenizer().encode("the cat")
    assert "".join(grow([*ids, 3, *ids], stop_ids=[3])) == "the cat"
    row = Continuation(frozenset([3]), (), None, False)
    assert [row.push(5), row.push(3), row.push(5), row.finish()] == [[5], [], [], []]


@pytest.mark.parametrize("text", [True, False])
def test_an_empty_row(text):
    assert grow([], text=text) == ["" if text else []]
