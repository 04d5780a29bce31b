"""Text that comes piece by piece is the text that comes at once, and no piece holds half a character."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, pre_tokenizers

from keras_qwen.tokenizer import QwenTokenizer, StreamDecoder, stream
from keras_qwen.tokenizer.byte_level import train_byte_level_bpe

SPECIAL = ["<|endoftext|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def tokenizer():
    bpe = train_byte_level_bpe(["中文字符 emoji 🙂🙂 é"], 280, SPECIAL)
    bpe.add_tokens([AddedToken("<｜reply▁begins｜>", special=False, normalized=False)])
    return QwenTokenizer(bpe)


def pieces_of(tokenizer, ids):
    decoder = StreamDecoder(tokenizer)
    return [decoder.push(i) for i in ids] + [decoder.flush()]


def test_the_alphabet_of_bytes():
    assert set(stream._BYTES) == set(pre_tokenizers.ByteLevel.alphabet())
    assert (stream._BYTES["Ġ"], stream._BYTES["Ċ"], stream._BYTES["a"], stream._BYTES["ÿ"]) == (32, 10, 97, 255)


@given(ids=st.lists(st.integers(0, 285)))
@example(ids=[])
def test_pieces_of_any_ids_make_the_whole(tokenizer, ids):
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@given(text=st.text(st.sampled_from("aé中文字🙂👩\u200d👧 \n\ufffd")))
@example(text="👩\u200d👩\u200d👧🇫🇷中é")
def test_pieces_of_text_never_break_a_character(tokenizer, text):
    ids = tokenizer.encode(text)
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == tokenizer.normalize(text)
    assert pieces[-1] == ""
    assert sum(piece.count("\ufffd") for piece in pieces) == text.count("\ufffd")


def test_a_character_comes_with_its_last_byte(tokenizer):
    ids = [tokenizer.token_to_id(character) for character in "çĮ«a"]  # 猫's three bytes as byte-level characters
    assert tokenizer.decode(ids) == "猫a"
    assert pieces_of(tokenizer, ids) == ["", "", "猫", "a", ""]


def test_a_broken_end_comes_with_flush(tokenizer):
    ids = [tokenizer.token_to_id(character) for character in "açĮ"]
    assert pieces_of(tokenizer, ids) == ["a", "", "", "\ufffd"]
    decoder = StreamDecoder(tokenizer)
    decoder.push(ids)
    decoder.flush()
    assert decoder.push(ids[0]) == "a"  # nothing is left of the last text


def test_special_tokens_are_left_out_and_other_added_ones_kept(tokenizer):
    ids = tokenizer.encode("é<|im_end|><｜reply▁begins｜><|endoftext|>")
    assert "".join(pieces_of(tokenizer, ids)) == "é<｜reply▁begins｜>"


def test_ids_beyond_the_vocabulary_say_nothing(tokenizer):
    assert StreamDecoder(tokenizer).push([10**6, tokenizer.token_to_id("a")]) == "a"


def test_several_ids_at_once(tokenizer):
    ids = tokenizer.encode("中文 é")
    assert StreamDecoder(tokenizer).push(ids) == "中文 é"
    assert StreamDecoder(tokenizer).push(np.array(ids, "int32")) == "中文 é"
    assert StreamDecoder(tokenizer).push(np.int32(tokenizer.token_to_id("a"))) == "a"


def test_it_says_whether_bytes_are_waiting(tokenizer):
    decoder = StreamDecoder(tokenizer)
    ids = tokenizer.encode("\U0001f980")
    assert len(ids) > 1 and not decoder.pending
    assert [bool(decoder.push(i)) != decoder.pending for i in ids] == [True] * len(ids)
