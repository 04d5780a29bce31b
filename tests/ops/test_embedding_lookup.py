"""embedding_lookup: rows, and a dense gradient that counts repeated ids."""

import keras
import ml_dtypes
import numpy as np
import pytest

from keras_qwen.ops.embedding_lookup import embedding_lookup, shared_embedding

BACKEND = keras.backend.backend()
MODES = {"jax": ["eager", "compiled"], "tensorflow": ["eager", "graph", "compiled"], "torch": ["eager"]}[BACKEND]
TABLE = np.random.default_rng(0).normal(size=(7, 3)).astype("float32")
IDS = np.array([[1, 1, 6], [0, 1, 6]], "int32")
SLOPES = np.random.default_rng(1).normal(size=(2, 3, 3)).astype("float32")


def gradient(function, table, mode="eager"):
    table = keras.ops.convert_to_tensor(table)
    if BACKEND == "jax":
        import jax

        found = jax.grad(function)
        return np.asarray((jax.jit(found) if mode == "compiled" else found)(table))
    if BACKEND == "torch":
        function(table.requires_grad_()).backward()
        return keras.ops.convert_to_numpy(table.grad)
    import tensorflow as tf

    def found(table):
        with tf.GradientTape() as tape:
            tape.watch(table)
            value = function(table)
        slopes = tape.gradient(value, table)
        assert not isinstance(slopes, tf.IndexedSlices)
        return slopes

    return (found if mode == "eager" else tf.function(found, jit_compile=mode == "compiled"))(table).numpy()


@pytest.mark.parametrize("mode", MODES)
def test_rows_and_gradient(mode):
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(embedding_lookup(TABLE, IDS)), TABLE[IDS])
    expected = np.zeros_like(TABLE)
    np.add.at(expected, IDS, SLOPES)
    found = gradient(lambda t: keras.ops.sum(keras.ops.multiply(embedding_lookup(t, IDS), SLOPES)), TABLE, mode)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_shared_with_a_head(mode):
    expected = np.full_like(TABLE, 2.0)
    np.add.at(expected, IDS, SLOPES)

    def function(table):
        vectors, table = shared_embedding(table, IDS)
        return keras.ops.sum(keras.ops.multiply(vectors, SLOPES)) + 2.0 * keras.ops.sum(table)

    np.testing.assert_allclose(gradient(function, TABLE, mode), expected, rtol=1e-6)


def test_many_repeats_in_bfloat16_are_summed_in_float32():
    """256 in bfloat16 no longer grows by 1: a sum in it would stop there."""
    if BACKEND == "torch":
        pytest.skip("torch adds in the table's dtype")
    ids = np.full((2, 1000), 3, "int32")
    found = gradient(lambda t: keras.ops.sum(embedding_lookup(t, ids)), TABLE.astype(ml_dtypes.bfloat16))
    assert found.dtype == ml_dtypes.bfloat16
    expected = np.zeros_like(TABLE)
    expected[3] = 2000
    np.testing.assert_array_equal(found.astype("float32"), expected)


def test_a_keras_variable_is_a_table():
    variable = keras.Variable(TABLE)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(shared_embedding(variable, IDS)[1]), TABLE)


def test_bad_input():
    with pytest.raises(ValueError, match="table must have the shape"):
        embedding_lookup(TABLE[0], IDS)
    with pytest.raises(ValueError, match="ids must be integers"):
        embedding_lookup(TABLE, SLOPES)
