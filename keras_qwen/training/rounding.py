"""Rounding to fewer bits that is right on average, so that a small update is not lost every time.

Rounded to nearest, a bfloat16 weight ignores updates below 1/256 of itself. Rounded up with a probability in proportion
to how near the upper neighbour is, it follows their sum (Gupta et al., 2015, "Deep Learning with Limited Numerical
Precision", arXiv:1502.02551).
"""

from keras import ops


def random_bits(shape, seed):
    """Random int32 numbers that depend on a seed alone, the same on every backend.

    A hash of the entry's index (C. Wellons' "lowbias32" integer mixer): a few operations that a compiler puts into the
    loop they are used in, where a proper generator would write out an array.

    Args:
        shape: of the numbers.
        seed: int32 scalar.
    """
    index = ops.zeros((), "int32")
    for size in shape:  # dimension by dimension: one long range, reshaped, is an array on accelerators
        index = ops.expand_dims(index * size, -1) + ops.arange(size, dtype="int32")
    return _mixed(ops.bitwise_xor(index, _mixed(seed)))


def _mixed(x):
    x = _xor_shifted(x, 16) * 0x7FEB352D
    x = _xor_shifted(x, 15) * (0x846CA68B - 2**32)  # as a signed number
    return _xor_shifted(x, 16)


def _xor_shifted(x, bits):
    """x ^ (x >> bits), where the shift brings in zeros as that of an unsigned number does."""
    return ops.bitwise_xor(x, ops.bitwise_and(ops.right_shift(x, bits), 2 ** (32 - bits) - 1))


def uniform(bits):
    """Numbers from 0 up to but not including 1, float32, from random bits."""
    return ops.cast(ops.bitwise_and(bits, 2**24 - 1), "float32") * 2.0**-24


def stochastic_bfloat16(x, bits):
    """bfloat16 neighbours of float32 x, whose mean is x: the upper one as often as x is near it.

    Args:
        x: float32 tensor.
        bits: int32 tensor of that shape from `random_bits`.
    """
    # bfloat16 is the upper half of float32. Adding to the lower half carries into the upper with the right probability.
    rounded = ops.bitwise_and(ops.view(x, "int32") + ops.bitwise_and(bits, 0xFFFF), -0x10000)
    return ops.cast(ops.where(ops.isfinite(x), ops.view(rounded, "float32"), x), "bfloat16")
