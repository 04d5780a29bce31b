"""The tokenizer on small vocabularies made here: ids, text, batches, and what is refused."""

import pickle
import unicodedata

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from keras_qwen.tokenizer import QwenTokenizer
from keras_qwen.tokenizer.byte_level import SPLIT_PATTERN, byte_level_bpe

TEXTS = ["The sea is warm and the sun is low.", "Warm sand, warm sea, low sun.", "What is the sea? It is warm."]


@pytest.fixture(scope="module")
def tokenizer():
    return QwenTokenizer.train(TEXTS, 280)


@pytest.fixture
def three_merges():
    """Single characters at 0-5, then "He", "ll", "Hell"; <|endoftext|> = 9."""
    merges = [("H", "e"), ("l", "l"), ("He", "ll")]
    vocabulary = {token: i for i, token in enumerate(["H", "e", "l", "o", "Ġ", "Ċ", "He", "ll", "Hell"])}
    bpe = byte_level_bpe(vocabulary, merges)
    bpe.add_special_tokens(["<|endoftext|>"])
    return QwenTokenizer(bpe, eos_token="<|endoftext|>", pad_token="<|endoftext|>")


def test_merges_are_applied_in_order(three_merges):
    assert three_merges.encode("Hello Hel\n") == [8, 3, 4, 6, 2, 5]
    assert three_merges.encode(["Hell", "", "o<|endoftext|>"]) == [[8], [], [3, 9]]
    assert three_merges.vocab_size == 10


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("IT'S we'll", ["IT", "'S", " we", "'ll"]),
        ("in 2024", ["in", " ", "2", "0", "2", "4"]),
        ("no!\n\n  x\t ", ["no", "!\n\n", " ", " x", "\t "]),
        ("a.b\r\n \nc", ["a", ".b", "\r\n \n", "c"]),
        ("猫が 好き", ["猫が", " 好き"]),
    ],
)
def test_text_is_cut_as_qwen_cuts_it(text, pieces):
    cut = tokenizers.pre_tokenizers.Split(tokenizers.Regex(SPLIT_PATTERN), behavior="isolated")
    assert [piece for piece, _ in cut.pre_tokenize_str(text)] == pieces


@given(text=st.text())
def test_decoding_gives_the_composed_text_back(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == unicodedata.normalize("NFC", text) == tokenizer.normalize(text)
    assert tokenizer.encode_with_offsets(text)[0] == ids


def test_composed_and_decomposed_text_are_the_same(tokenizer):
    assert tokenizer.encode("cafe\u0301") == tokenizer.encode("caf\u00e9")


def test_offsets_cover_the_text(tokenizer):
    text = "warm é<|im_end|>"
    ids, offsets = tokenizer.encode_with_offsets(text)
    assert [tokenizer.id_to_token(i) for i in ids[-3:]] == ["Ã", "©", "<|im_end|>"]
    assert offsets[-3:] == [(5, 6), (5, 6), (6, 16)]
    assert offsets[0][0] == 0


def test_offsets_include_spaces_that_the_tokenizer_trims(tokenizer):
    trimming = tokenizers.Tokenizer.from_str(tokenizer.files()["tokenizer.json"].decode())
    trimming.post_processor = tokenizers.processors.ByteLevel(add_prefix_space=False, trim_offsets=True)
    assert trimming.encode(" warm sea").offsets[0][0] == 1
    assert QwenTokenizer(trimming).encode_with_offsets(" warm sea") == tokenizer.encode_with_offsets(" warm sea")
    assert QwenTokenizer(trimming).encode_with_offsets(" warm sea")[1][0][0] == 0


def test_special_tokens_are_kept_unless_told_otherwise(tokenizer):
    ids = tokenizer.encode("<|im_start|>sea<|im_end|><|endoftext|>")
    start, end, rest = (tokenizer.token_to_id(f"<|{name}|>") for name in ("im_start", "im_end", "endoftext"))
    assert ids[0] == start and ids[-2:] == [end, rest]
    assert tokenizer.decode(ids) == "<|im_start|>sea<|im_end|><|endoftext|>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "sea"
    assert tokenizer.special_token_ids == [rest, start, end]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (end, rest, None)
    assert tokenizer.id_to_token(end) == "<|im_end|>"
    assert tokenizer.token_to_id("absent") is None and tokenizer.id_to_token(10**6) is None


def test_what_the_tokenizer_adds_around_a_text_can_be_left_out(tokenizer):
    bpe = tokenizers.Tokenizer.from_str(tokenizer.files()["tokenizer.json"].decode())
    begin = bpe.token_to_id("<|endoftext|>")
    bpe.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", begin)]
    )
    adding = QwenTokenizer(bpe, chat_template=tokenizer.chat_template)
    assert adding.encode("sea") == [begin, *tokenizer.encode("sea")]
    assert adding.encode("sea", add_special_tokens=False) == tokenizer.encode("sea")
    chat = [{"role": "user", "content": "sea"}]
    assert adding.apply_chat_template(chat) == tokenizer.apply_chat_template(chat)


def test_decode_takes_arrays_and_batches(three_merges):
    assert three_merges.decode(np.array([8, 3])) == "Hello"
    assert three_merges.decode([np.int32(8), np.int64(3)]) == "Hello"
    assert three_merges.decode([[8, 3], [0]]) == ["Hello", "H"]
    assert three_merges.decode(np.array([[8, 9], [3, 9]]), skip_special_tokens=True) == ["Hell", "o"]
    assert three_merges.decode(8) == "Hell"
    assert three_merges.decode([]) == ""
    assert three_merges.decode([8, 12345]) == "Hell"


@pytest.mark.parametrize(
    ("side", "token_ids", "padding_mask"),
    [
        ("right", [[8, 3, 9, 9], [0, 9, 9, 9]], [[1, 1, 0, 0], [1, 0, 0, 0]]),
        ("left", [[9, 9, 8, 3], [9, 9, 9, 0]], [[0, 0, 1, 1], [0, 0, 0, 1]]),
    ],
)
def test_batches_are_padded_on_either_side(three_merges, side, token_ids, padding_mask):
    batch = three_merges.encode_batch(["Hello", "H"], length=4, padding_side=side)
    assert batch["token_ids"].dtype == batch["padding_mask"].dtype == np.int32
    np.testing.assert_array_equal(batch["token_ids"], token_ids)
    np.testing.assert_array_equal(batch["padding_mask"], padding_mask)


def test_batches_are_as_long_as_their_longest_text(three_merges):
    np.testing.assert_array_equal(three_merges.encode_batch(["Hello", "H"])["token_ids"], [[8, 3], [0, 9]])


def test_batches_are_cut_where_told(three_merges):
    def cut(side):
        return three_merges.encode_batch(["Hello", "o"], length=1, truncation=side)["token_ids"].tolist()

    assert cut("right") == [[8], [3]]
    assert cut("left") == [[3], [3]]


def test_rows_of_one_length_need_no_padding_token(three_merges):
    bare = QwenTokenizer(three_merges._tokenizer)
    assert bare.encode_batch(["H", "o"])["token_ids"].tolist() == [[0], [3]]
    with pytest.raises(ValueError, match="pad_token"):
        bare.encode_batch(["H", "Hello"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(texts=[]), "at least one"),
        (dict(texts="Hello"), "list"),
        (dict(texts=["H", "Hello"], length=1), "row 1 has 2 tokens.*length=1"),
        (dict(texts=["H"], padding_side="both"), "padding_side"),
        (dict(texts=["H"], truncation=True), "truncation"),
    ],
)
def test_batches_that_cannot_be_made(three_merges, arguments, message):
    with pytest.raises(ValueError, match=message):
        three_merges.encode_batch(**arguments)


@pytest.mark.parametrize("text", [None, 5, ["a", 5], b"a", {"a": 1}])
def test_only_text_is_encoded(tokenizer, text):
    with pytest.raises(ValueError, match="encode takes a str or a list of str"):
        tokenizer.encode(text)


def test_lone_surrogates_are_refused(tokenizer):
    with pytest.raises(ValueError, match="surrogate"):
        tokenizer.encode("a\ud800")


@pytest.mark.parametrize("ids", [[-100], [1.5], ["a"], [2**40]])
def test_only_ids_are_decoded(tokenizer, ids):
    with pytest.raises(ValueError, match="integers from 0 on"):
        tokenizer.decode(ids)


def test_training_is_reproducible_and_bounded(tokenizer):
    assert QwenTokenizer.train(TEXTS, 280).files() == tokenizer.files()
    assert tokenizer.vocab_size == 280
    assert tokenizer.special_token_ids == [277, 278, 279]
    assert len(tokenizer.encode(TEXTS[0])) < len(TEXTS[0].encode())
    assert QwenTokenizer.train([], 300).vocab_size == 259
    with pytest.raises(ValueError, match="vocab_size=258.*259"):
        QwenTokenizer.train(TEXTS, 258)


def test_other_kinds_of_tokenizers_are_refused():
    with pytest.raises(ValueError, match="byte-level"):
        QwenTokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0})))


def test_named_tokens_must_exist(three_merges):
    with pytest.raises(ValueError, match="bos_token '<s>'"):
        QwenTokenizer(three_merges._tokenizer, bos_token="<s>")


def test_it_can_be_pickled(tokenizer):
    copy = pickle.loads(pickle.dumps(tokenizer))
    chat = [{"role": "user", "content": "sea"}]
    assert copy.apply_chat_template(chat) == tokenizer.apply_chat_template(chat)
    assert copy.files() == tokenizer.files()


def test_repr_names_the_special_tokens(tokenizer):
    assert repr(tokenizer) == "<QwenTokenizer vocab_size=280, eos_token='<|im_end|>', pad_token='<|endoftext|>'>"
