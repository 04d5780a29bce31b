"""add_low_rank: value and gradients, and what its backward pass keeps."""

import keras
import numpy as np
import pytest

from keras_qwen.ops.elementwise import swiglu
from keras_qwen.ops.low_rank import add_low_rank

RNG = np.random.default_rng(0)
Y, X = RNG.normal(size=(2, 5, 7)), RNG.normal(size=(2, 5, 4))
A, B, SLOPES = RNG.normal(size=(4, 3)), RNG.normal(size=(3, 7)), RNG.normal(size=(2, 5, 7))
ARRAYS = [x.astype("float32") for x in (Y, X, A, B)]


def test_value_in_half_precision():
    found = add_low_rank(*(keras.ops.cast(x, "bfloat16") for x in ARRAYS), 0.5)
    assert keras.backend.standardize_dtype(found.dtype) == "bfloat16"
    np.testing.assert_allclose(
        keras.ops.convert_to_numpy(keras.ops.cast(found, "float32")), Y + 0.5 * X @ A @ B, atol=0.1
    )


def test_value_and_gradients():
    function = lambda *arrays: keras.ops.sum(add_low_rank(*arrays, 0.5) * SLOPES.astype("float32"))  # noqa: E731
    tensors = [keras.ops.convert_to_tensor(x) for x in ARRAYS]
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        value, found = jax.jit(jax.value_and_grad(function, (0, 1, 2, 3)))(*tensors)
    elif backend == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            tape.watch(tensors)
            value = function(*tensors)
        found = tape.gradient(value, tensors)
    else:
        tensors = [t.requires_grad_() for t in tensors]
        value = function(*tensors)
        value.backward()
        value, found = value.detach(), [t.grad for t in tensors]
    expected = (
        SLOPES,
        0.5 * SLOPES @ B.T @ A.T,
        0.5 * np.einsum("bti,btj->ij", X, SLOPES @ B.T),
        0.5 * np.einsum("bti,btj->ij", X @ A, SLOPES),
    )
    np.testing.assert_allclose(float(value), ((Y + 0.5 * X @ A @ B) * SLOPES).sum(), rtol=1e-5)
    for gradient, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(keras.ops.convert_to_numpy(gradient), want, atol=1e-5)


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="XLA's own question")
def test_the_summands_are_not_kept():
    """The sum, used in both passes, is one array of memory, where XLA would keep two to add them twice."""
    import jax

    x, w, a, b = (jax.ShapeDtypeStruct(s, "float32") for s in ((64, 32), (32, 2048), (32, 4), (4, 2048)))

    def loss(x, w, a, b, count=8):
        for _ in range(count):
            gate = add_low_rank(x @ w, x, a, b, 0.5)
            x = swiglu(gate, gate)[:, :32]
        return x.sum()

    compiled = jax.jit(jax.grad(loss, argnums=(2, 3))).lower(x, w, a, b).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 8 * 1.5 * 64 * 2048 * 4
