"""swiglu and rms_norm: values and gradients against plain formulas, in float32 and half precision."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_qwen.ops.elementwise import rms_norm, swiglu

RNG = np.random.default_rng(0)
X, Y, SLOPES = (RNG.normal(0, 2, (3, 4, 10)).astype("float32") for _ in range(3))
SCALE = RNG.normal(1, 0.5, 10).astype("float32")


def plain_swiglu(gate, up):
    return ops.silu(gate) * up


def plain_rms_norm(x, scale):
    wide = ops.cast(x, "float32")
    wide = wide * ops.rsqrt(ops.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return ops.cast(wide, scale.dtype) * scale


def value_and_gradients(function, inputs, dtype):
    """Of sum(function(*inputs) * SLOPES)."""
    inputs = [ops.cast(ops.convert_to_tensor(x), dtype) for x in inputs]
    backend = keras.backend.backend()
    loss = lambda *inputs: ops.sum(ops.cast(function(*inputs), "float32") * ops.convert_to_tensor(SLOPES))  # noqa: E731
    if backend == "jax":
        import jax

        gradients = jax.grad(loss, argnums=(0, 1))(*inputs)
    elif backend == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            tape.watch(inputs)
            total = loss(*inputs)
        gradients = tape.gradient(total, inputs)
    else:
        inputs = [x.clone().requires_grad_() for x in inputs]
        loss(*inputs).backward()
        gradients = [x.grad for x in inputs]
        inputs = [x.detach() for x in inputs]
    arrays = [function(*inputs), *gradients]
    assert {keras.backend.standardize_dtype(a.dtype) for a in arrays} == {dtype}
    return [ops.convert_to_numpy(ops.cast(a, "float32")) for a in arrays]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("bfloat16", 0.02), ("float16", 3e-3)])
@pytest.mark.parametrize(
    ("function", "plain", "inputs"),
    [(swiglu, plain_swiglu, (X, Y)), (lambda x, s: rms_norm(x, s, 1e-6), plain_rms_norm, (X, SCALE))],
    ids=["swiglu", "rms_norm"],
)
def test_value_and_gradients_are_those_of_the_formula(function, plain, inputs, dtype, tolerance):
    found = value_and_gradients(function, inputs, dtype)
    expected = value_and_gradients(plain, inputs, dtype)
    for name, a, b in zip(("value", "first gradient", "second gradient"), found, expected, strict=True):
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b), name
