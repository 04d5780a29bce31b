"""Dequantising on torch."""

from keras import ops


def dequantize(quantized, dtype, parts, after=None):
    """The matrix in a dtype; `after` is there already, as torch computes when it is told to."""
    return ops.cast(quantized.dequantize(parts), dtype)
