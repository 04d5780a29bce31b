"""The product with a quantised matrix: value, gradient, and that nothing of the matrix's size is kept."""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest

from keras_qwen.ops.quantization import KINDS, Quantized, quantize
from keras_qwen.ops.quantized_matmul import dequantize, quantized_matmul

BACKEND = keras.backend.backend()
RNG = np.random.default_rng(0)


def quantised(kind, inputs, outputs, rng=RNG):
    matrix = rng.normal(size=(inputs, outputs)).astype("float32")
    quantized = Quantized(kind, inputs, outputs)
    parts = quantize(quantized, lambda start, stop: matrix[:, start:stop])
    return quantized, {name: keras.ops.convert_to_tensor(part) for name, part in parts.items()}


def numpy(x):
    return keras.ops.convert_to_numpy(keras.ops.cast(x, "float32"))


def value_and_gradient(function, x):
    """A function's value, and the gradient of its weighted sum."""

    def loss(x):
        y = function(x)
        weights = keras.ops.reshape(keras.ops.arange(np.prod(y.shape), dtype=y.dtype) / 64, y.shape)
        return keras.ops.sum(y * weights), y

    x = keras.ops.convert_to_tensor(x)
    if BACKEND == "jax":
        import jax

        (_, value), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(x)
    elif BACKEND == "tensorflow":
        import tensorflow as tf

        @tf.function(autograph=False)
        def run(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                total, value = loss(x)
            return value, tape.gradient(total, x)

        value, gradient = run(x)
    else:
        x.requires_grad_(True)
        total, value = loss(x)
        total.backward()
        value, gradient = value.detach(), x.grad
    return numpy(value), numpy(gradient)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(64, 256), (70, 300), (1, 3)])
@pytest.mark.parametrize("rows", [(1,), (5,), (2, 3), (1, 1)])
def test_value_and_gradient(kind, shape, rows):
    quantized, parts = quantised(kind, *shape)
    matrix = numpy(dequantize(quantized, parts))
    np.testing.assert_allclose(matrix, numpy(quantized.dequantize(parts)), rtol=1e-6, atol=1e-7)
    x = RNG.normal(size=(*rows, shape[0])).astype("float32")
    value, gradient = value_and_gradient(lambda x: quantized_matmul(x, quantized, parts), x)
    slopes = (np.arange(value.size, dtype="float32") / 64).reshape(value.shape)
    np.testing.assert_allclose(value, x @ matrix, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(gradient, slopes @ matrix.T, rtol=1e-5, atol=1e-3)  # of sums as large as 100


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(dtype):
    quantized, parts = quantised("nf4", 128, 64)
    x = keras.ops.cast(keras.ops.convert_to_tensor(RNG.normal(size=(3, 128)).astype("float32")), dtype)
    product = quantized_matmul(x, quantized, parts)
    assert keras.backend.standardize_dtype(product.dtype) == dtype
    half = dequantize(quantized, parts, dtype)
    assert keras.backend.standardize_dtype(half.dtype) == dtype
    np.testing.assert_allclose(numpy(product), numpy(x) @ numpy(half), rtol=0.02, atol=0.3)


@pytest.mark.skipif(BACKEND != "jax", reason="reads JAX's own account of what is kept")
def test_only_inputs_and_codes_are_kept():
    import jax

    for kind in KINDS:
        quantized, parts = quantised(kind, 128, 256)
        _, pull = jax.vjp(lambda x, q=quantized, p=parts: quantized_matmul(x, q, p), np.ones((4, 128), "float32"))
        kept = [leaf for leaf in jax.tree.leaves(pull) if hasattr(leaf, "nbytes")]
        assert sum(leaf.nbytes for leaf in kept) <= quantized.nbytes + 4 * 4 * 128, kind


CHAIN = """
import resource
import keras
import numpy as np
from keras_qwen.ops.quantization import Quantized
from keras_qwen.ops.quantized_matmul import quantized_matmul

size, count = 2048, 24
quantized = Quantized("{kind}", size, size)
layers = [
    {{n: keras.ops.ones(p.shape, p.dtype) for n, p in quantized.parts.items()}} for _ in range(count)
]
parameters = [keras.ops.ones((size,)) * 1e-4 for _ in range(count)]

def loss(parameters, layers):
    x = keras.ops.ones((8, size))
    for scale, parts in zip(parameters, layers):
        x = keras.ops.tanh(quantized_matmul(x * scale, quantized, parts))
    return keras.ops.sum(x)

if keras.backend.backend() == "jax":
    import jax
    step = jax.jit(jax.grad(loss))
    temporary = step.lower(parameters, layers).compile().memory_analysis().temp_size_in_bytes
    assert temporary < 8 * 4 * size * size, temporary
    run = lambda: jax.block_until_ready(step(parameters, layers))
else:
    import tensorflow as tf

    @tf.function(autograph=False, jit_compile={jit})
    def step(parameters, layers):
        with tf.GradientTape() as tape:
            tape.watch(parameters)
            total = loss(parameters, layers)
        return tape.gradient(total, parameters)

    run = lambda: step(parameters, layers)

small = quantized_matmul(keras.ops.ones((8, size)), quantized, layers[0])  # loads what is loaded at first
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.skipif(BACKEND == "torch", reason="computes op by op, and keeps what the function says")
@pytest.mark.parametrize("jit", [False, True] if BACKEND == "tensorflow" else [True])
def test_no_dequantised_matrix_lives_until_the_backward_pass(jit):
    """24 matrices of 16 MB each, of which a few may be there at a time. (Compiling takes memory, too.)"""
    code = CHAIN.format(kind="nf4", jit=jit)
    environment = {**os.environ, "KERAS_BACKEND": BACKEND, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) < 200
