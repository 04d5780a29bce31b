"""A row times a matrix, in the forms made for decoding."""

import keras
import numpy as np
import pytest

from keras_qwen.ops import row_matmul as module
from keras_qwen.ops.row_matmul import row_matmul

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [(), (1,), (1, 1), (2,), (1, 3)])
@pytest.mark.parametrize("size", [(16, 40), (20, 40)])
def test_it_is_the_product(monkeypatch, dtype, transposed, rows, size):
    monkeypatch.setattr(module, "_SMALL", 1)
    row, matrix = RNG.normal(size=(*rows, size[0])).astype("float32"), RNG.normal(size=size).astype("float32")
    row, matrix = (keras.ops.cast(keras.ops.convert_to_tensor(x), dtype) for x in (row, matrix))
    given = keras.ops.transpose(matrix) if transposed else matrix
    product = row_matmul(row, given, transposed)
    assert tuple(product.shape) == (*rows, 40) and keras.backend.standardize_dtype(product.dtype) == dtype
    row, matrix, product = (keras.ops.convert_to_numpy(keras.ops.cast(x, "float32")) for x in (row, matrix, product))
    tolerance = dict(rtol=1e-5, atol=1e-5) if dtype == "float32" else dict(rtol=0.02, atol=0.1)
    np.testing.assert_allclose(product, row @ matrix, **tolerance)


def test_it_has_a_gradient(monkeypatch):
    monkeypatch.setattr(module, "_SMALL", 1)
    layer = keras.layers.Dense(24, use_bias=False)
    layer.build((1, 16))
    row = RNG.normal(size=(1, 16)).astype("float32")
    if keras.backend.backend() == "jax":
        import jax

        gradient = jax.grad(lambda kernel: row_matmul(row, kernel).sum())(layer.kernel.value)
    elif keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(row_matmul(tf.constant(row), tf.convert_to_tensor(layer.kernel.value)))
        gradient = tape.gradient(loss, layer.kernel.value)
    else:
        pytest.skip("torch takes the plain product")
    np.testing.assert_allclose(keras.ops.convert_to_numpy(gradient), np.tile(row.T, (1, 24)), rtol=1e-6)
