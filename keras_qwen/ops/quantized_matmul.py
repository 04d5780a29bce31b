"""The product with a quantised matrix, which is dequantised for the product, and again for its gradient."""

import importlib
from typing import NamedTuple

import keras
from keras import ops

from keras_qwen.ops.attention_backend import backend_module
from keras_qwen.ops.quantization import Quantized
from keras_qwen.ops.row_matmul import row_matmul

_BACKEND = importlib.import_module(f"keras_qwen.ops.quantized_matmul_{keras.backend.backend()}")


def quantized_matmul(inputs, quantized, parts):
    """`inputs @ dequantised matrix`; the matrix and its scales get no gradient.

    Nothing of the matrix's size is kept from the forward to the backward pass, and there is one dequantised matrix at
    a time: each is made when what it is multiplied with is there.

    Args:
        inputs: tensor (..., inputs).
        quantized: the matrix's `keras_qwen.ops.quantization.Quantized`.
        parts: {name: tensor} of its parts.

    Returns:
        Tensor (..., outputs) of the dtype of `inputs`.

    Example:
        >>> quantized = Quantized("nf4", *kernel.shape)
        >>> quantized_matmul(inputs, quantized, quantize(quantized, lambda start, stop: kernel[:, start:stop]))
    """
    settings = _Settings(quantized, keras.backend.standardize_dtype(inputs.dtype))
    return backend_module().call_with_gradient(_forward, _backward, settings, (inputs,), dict(parts))


def dequantize(quantized, parts, dtype="float32"):
    """The matrix (inputs, outputs) that `quantized_matmul` multiplies with.

    Args:
        quantized, parts: of `quantized_matmul`.
        dtype: to which the float32 values are cast.
    """
    return _BACKEND.dequantize(quantized, dtype, dict(parts))


class _Settings(NamedTuple):
    quantized: Quantized
    dtype: str


def _forward(settings, inputs, parts):
    return row_matmul(inputs[0], _BACKEND.dequantize(*settings, parts, after=inputs[0])), ()


def _backward(settings, inputs, parts, saved, slopes):
    kernel = _BACKEND.dequantize(*settings, parts, after=slopes)
    return (ops.matmul(slopes, ops.transpose(kernel)),)
