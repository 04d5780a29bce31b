"""Attention over a cache equals attention over the tokens themselves."""

import keras
import numpy as np
import pytest

from keras_qwen.ops.attention import attention
from keras_qwen.ops.attention_cached import cached_attention, write_cache

RNG = np.random.default_rng(0)


def tensor(*shape):
    return keras.ops.convert_to_tensor(RNG.normal(size=shape).astype("float32"))


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("heads, kv_heads", [(4, 2), (2, 2), (3, 1)])
def test_it_equals_attention(length, heads, kv_heads):
    keys, values = tensor(2, 9, kv_heads, 8), tensor(2, 9, kv_heads, 8)
    query = tensor(2, length, heads, 8)
    mask = np.arange(9) <= np.arange(9 - length, 9)[:, None]
    mask = keras.ops.convert_to_tensor(np.stack([mask, mask & (np.arange(9) > 2)]))
    want = attention(query, keys, values, mask=mask, causal=False)
    heads_first = [keras.ops.transpose(x, (0, 2, 1, 3)) for x in (keys, values)]
    found = cached_attention(query, *heads_first, mask, 8**-0.5)
    np.testing.assert_allclose(*(keras.ops.convert_to_numpy(x) for x in (found, want)), atol=1e-6)


@pytest.mark.parametrize("length", [1, 3])
def test_writing(length):
    cache, new = tensor(2, 2, 9, 8), tensor(2, length, 2, 8)
    written = keras.ops.convert_to_numpy(write_cache(cache, new, 4))
    want = np.array(keras.ops.convert_to_numpy(cache))
    want[:, :, 4 : 4 + length] = keras.ops.convert_to_numpy(new).transpose(0, 2, 1, 3)
    np.testing.assert_array_equal(written, want)


def test_a_tensorflow_variable_is_written_in_place():
    if keras.backend.backend() != "tensorflow":
        pytest.skip("of TensorFlow alone")
    import tensorflow as tf

    cache = tf.Variable(tf.zeros((1, 2, 5, 4)))
    assert write_cache(cache, tf.ones((1, 1, 2, 4)), tf.constant(3)) is cache
    assert cache.numpy()[0, 0, :, 0].tolist() == [0, 0, 0, 1, 0]
