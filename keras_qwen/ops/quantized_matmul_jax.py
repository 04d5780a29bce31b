"""Dequantising on JAX."""

import jax

from keras_qwen.ops.attention_backend import backend_module
from keras_qwen.ops.quantization import depending_on, first_value


def dequantize(quantized, dtype, parts, after=None):
    """The matrix in a dtype, made only when `after`, a tensor, is there."""
    if after is not None and backend_module().device() == "cpu":  # where XLA's scheduler goes by data alone
        parts = depending_on(parts, first_value(after))
    elif after is not None:
        parts, _ = jax.lax.optimization_barrier((parts, after))
    return quantized.dequantize(parts).astype(dtype)
