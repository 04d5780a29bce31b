"""How the optimizer keeps Adam's moments: in bfloat16, or in 8 bits with a scale for each block of numbers."""

import functools
import math

from keras import ops

from keras_qwen.training.rounding import random_bits, stochastic_bfloat16, uniform

_BLOCKS = (128, 64, 32)  # numbers of a row that share a scale: the first that divides it
_TILE = 8  # rows; see `_blocks`
_SMALLEST = 4096  # entries; below, 8 bits save nothing worth having


@functools.cache  # one object for all variables of a shape, so that TensorFlow traces their update once
def moment_storage(name, shape):
    """The storage for a variable of a shape: `"bfloat16"` or `"int8"`; float32 where blocks would be too small."""
    if name == "bfloat16":
        return Bfloat16Moments()
    block = next((block for block in _BLOCKS if len(shape) > 1 and shape[-1] % block == 0), None)
    if block is None or math.prod(shape) < _SMALLEST:
        return Float32Moments()
    return Int8Moments(block)


class Float32Moments:
    """Both moments as they are.

    A storage has `state(shape)`, a list of `(name, shape, dtype)` of what it keeps; `read(state)`, the float32 moments
    (first, second); and `write(first, second, seed)`, the new state.
    """

    def state(self, shape):
        return [("momentum", shape, "float32"), ("velocity", shape, "float32")]

    def read(self, state):
        return state

    def write(self, first, second, seed):
        return first, second


class Bfloat16Moments:
    """Both moments in bfloat16, rounded stochastically: a step changes the second by less than bfloat16 resolves."""

    def state(self, shape):
        return [("momentum", shape, "bfloat16"), ("velocity", shape, "bfloat16")]

    def read(self, state):
        return tuple(ops.cast(x, "float32") for x in state)

    def write(self, first, second, seed):
        bits = random_bits(first.shape, seed)
        return stochastic_bfloat16(first, bits), stochastic_bfloat16(second, ops.right_shift(bits, 16))


class Int8Moments:
    """Both moments in 8 bits, along the last dimension in blocks with a float32 scale each, their largest magnitude.

    Blocks as in Dettmers et al., 2021, "8-bit Optimizers via Block-wise Quantization", arXiv:2110.02861. The levels
    are powers: of a block's scale (code / 127) ** 2 with the code's sign for the first moment, (code / 255) ** 4 for
    the second, which reaches 4e-9 of the scale. Rounding is stochastic, so that the slow second moment moves.

    Args:
        block: numbers that share a scale; divides the last dimension.
    """

    def __init__(self, block):
        self.block = block

    def state(self, shape):
        scales = (*shape[:-1], shape[-1] // self.block)
        return [
            ("momentum", shape, "int8"),
            ("momentum_scale", scales, "float32"),
            ("velocity", shape, "uint8"),
            ("velocity_scale", scales, "float32"),
        ]

    def read(self, state):
        first, first_scale, second, second_scale = state
        return _scaled(_signed_square(first), first_scale), _scaled(_fourth_power(second), second_scale)

    def write(self, first, second, seed):
        bits = random_bits(first.shape, seed)
        unit, first_scale = self._scales(first)
        magnitude = _round(ops.abs(unit), lambda code: ops.square(code / 127.0), 127.0 * ops.sqrt(ops.abs(unit)), bits)
        first = ops.cast(ops.where(first < 0, -magnitude, magnitude), "int8")
        unit, second_scale = self._scales(second)
        code = 255.0 * ops.sqrt(ops.sqrt(unit))
        code = _round(unit, lambda code: ops.square(ops.square(code / 255.0)), code, ops.right_shift(bits, 8))
        # The update divides by its root: what is not zero must not become zero.
        code = ops.maximum(code, ops.cast(second > 0, "float32"))
        return first, first_scale, ops.cast(code, "uint8"), second_scale

    def _scales(self, x):
        """x divided by its block's largest magnitude, and those."""
        shape = (*x.shape[:-1], x.shape[-1] // self.block)
        scale = ops.reshape(ops.max(_blocks(ops.abs(x), shape[-1]), axis=-1), shape)
        return _scaled(x, ops.where(scale > 0, 1.0 / ops.where(scale > 0, scale, 1.0), 0.0)), scale


def _signed_square(code):
    code = ops.cast(code, "float32") / 127.0
    return code * ops.abs(code)


def _fourth_power(code):
    return ops.square(ops.square(ops.cast(code, "float32") / 255.0))


def _blocks(x, count):
    """(..., rows, columns) as (..., rows, blocks, numbers of a block), the rows by eights.

    XLA for TPUs, where memory lies in tiles of 8 x 128, then takes blocks of 128 from where they lie; with the rows in
    one dimension it writes several float32 arrays of x's size.
    """
    *others, rows, columns = x.shape
    rows = (rows // _TILE, _TILE) if rows % _TILE == 0 else (rows,)
    return ops.reshape(x, (*others, *rows, count, columns // count))


def _scaled(x, scale):
    """Each block of x times its scale."""
    blocks = _blocks(x, scale.shape[-1])
    return ops.reshape(blocks * ops.reshape(scale, (*blocks.shape[:-1], 1)), x.shape)


def _round(value, level, code, bits):
    """The code below or above, so that the mean of their levels is the value."""
    below = ops.floor(code)
    low, high = level(below), level(below + 1.0)
    return below + ops.cast(uniform(bits) * (high - low) < value - low, "float32")
