"""The forms of input that generate takes."""

import keras
import numpy as np
import pytest

from keras_qwen import QwenTokenizer
from keras_qwen.generation.cache import bucket, decoding_masks, left_padded
from keras_qwen.generation.prompts import Prompts


@pytest.fixture(scope="module")
def tokenizer():
    return QwenTokenizer.train(["the cat sat on the mat"] * 3, vocab_size=280)


def read(inputs, tokenizer=None):
    prompts = Prompts.read(inputs, tokenizer, vocab_size=280)
    return prompts.rows, prompts.text, prompts.single


@pytest.mark.parametrize(
    "inputs, rows, single",
    [
        ([1, 2, 3], [[1, 2, 3]], True),
        ((1, 2), [[1, 2]], True),
        ([np.int64(1), np.int32(2)], [[1, 2]], True),
        (np.array([1, 2]), [[1, 2]], True),
        ([[1, 2], [3]], [[1, 2], [3]], False),
        (([1], (2, 3)), [[1], [2, 3]], False),
        ([np.array([1, 2]), np.array([3])], [[1, 2], [3]], False),
        (np.array([[1, 2], [3, 4]], "uint8"), [[1, 2], [3, 4]], False),
    ],
)
def test_ids(inputs, rows, single):
    assert read(inputs) == (rows, False, single)
    assert all(type(token_id) is int for row in read(inputs)[0] for token_id in row)


def test_tensors_of_the_backend():
    assert read(keras.ops.convert_to_tensor([[1, 2]], "int32")) == ([[1, 2]], False, False)


def test_texts_and_chats(tokenizer):
    assert read("the cat", tokenizer) == ([tokenizer.encode("the cat")], True, True)
    assert read(["the", "cat"], tokenizer) == ([tokenizer.encode("the"), tokenizer.encode("cat")], True, False)
    chat = [{"role": "user", "content": "the cat"}]
    rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True)
    assert read(chat, tokenizer) == ([rendered], True, True)
    assert read([chat, chat], tokenizer) == ([rendered, rendered], True, False)


@pytest.mark.parametrize(
    "inputs, words",
    [
        ([], "empty batch"),
        (np.zeros((0, 3), "int32"), "empty batch"),
        ([[]], "Prompt 0 is empty"),
        ([[1], []], "Prompt 1 is empty"),
        ("", "Prompt is empty"),
        ([280], "280"),
        ([[1], [-2]], "-2"),
        ([1.5, 2.0], "mixture"),
        ([True, False], "mixture"),
        (["the", 1], "mixture"),
        ([[1], "the"], "mixture"),
        ([{"role": "user", "content": "the"}, 1], "mixture"),
        ({"role": "user", "content": "the"}, "dict"),
        (7, "int"),
        (np.zeros((1, 2)), "float64"),
        (np.zeros((1, 2, 3), "int32"), "3"),
    ],
)
def test_bad_forms(tokenizer, inputs, words):
    with pytest.raises(ValueError, match=words):
        read(inputs, tokenizer)


@pytest.mark.parametrize("inputs", ["the", ["the"], [{"role": "user", "content": "the"}]])
def test_without_a_tokenizer_the_remedy_is_named(inputs):
    with pytest.raises(ValueError, match="model.tokenizer"):
        read(inputs)


def test_buckets_are_few_and_waste_little():
    sizes = [bucket(n) for n in range(1, 40000)]
    assert all(n <= size and (size <= 32 or size < 1.25 * n + 1 or size - n < 32) for n, size in enumerate(sizes, 1))
    assert sizes == sorted(sizes) and all(size % 32 == 0 for size in sizes)
    assert len(set(sizes)) < 50
    assert all(bucket(size) == size for size in set(sizes))


def test_left_padding_and_masks():
    ids, segments = left_padded([[5, 6, 7], [8]], 4)
    np.testing.assert_array_equal(ids, [[0, 5, 6, 7], [0, 0, 0, 8]])
    np.testing.assert_array_equal(segments, [[0, 1, 1, 1], [0, 0, 0, 1]])

    class Config:
        num_hidden_layers = 2
        window = staticmethod([None, 2].__getitem__)

    masks = decoding_masks(Config, keras.ops.convert_to_tensor([1, 3], "int32"), 4, 6)
    full, window = (keras.ops.convert_to_numpy(masks[w]).astype(int) for w in (None, 2))
    np.testing.assert_array_equal(full, [[[0, 1, 1, 1, 1, 0]], [[0, 0, 0, 1, 1, 0]]])
    np.testing.assert_array_equal(window, [[[0, 0, 0, 1, 1, 0]], [[0, 0, 0, 1, 1, 0]]])
