"""embedding_lookup: rows, and a dense gradient that counts repeated ids."""

import keras
import numpy as np
import pytest

from keras_qwen.ops.embedding_lookup import embedding_lookup, shared_embedding

TABLE = np.random.default_rng(0).normal(size=(7, 3)).astype("float32")
IDS = np.array([[1, 1, 6], [0, 1, 6]], "int32")
SLOPES = np.random.default_rng(1).normal(size=(2, 3, 3)).astype("float32")


def gradient(function, table):
    table = keras.ops.convert_to_tensor(table)
    if keras.backend.backend() == "jax":
        import jax

        return np.asarray(jax.grad(function)(table))
    import tensorflow as tf

    with tf.GradientTape() as tape:
        tape.watch(table)
        value = function(table)
    found = tape.gradient(value, table)
    assert not isinstance(found, tf.IndexedSlices)
    return found.numpy()


def test_rows_and_gradient():
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(embedding_lookup(TABLE, IDS)), TABLE[IDS])
    expected = np.zeros_like(TABLE)
    np.add.at(expected, IDS, SLOPES)
    found = gradient(lambda t: keras.ops.sum(embedding_lookup(t, IDS) * SLOPES), TABLE)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_shared_with_a_head():
    expected = np.full_like(TABLE, 2.0)
    np.add.at(expected, IDS, SLOPES)

    def function(table):
        vectors, table = shared_embedding(table, IDS)
        return keras.ops.sum(vectors * SLOPES) + 2.0 * keras.ops.sum(table)

    np.testing.assert_allclose(gradient(function, TABLE), expected, rtol=1e-6)


def test_bad_input():
    with pytest.raises(ValueError, match="table must have the shape"):
        embedding_lookup(TABLE[0], IDS)
    with pytest.raises(ValueError, match="ids must be integers"):
        embedding_lookup(TABLE, SLOPES)
