"""Matrices in few bits: the kinds there are, and how a matrix becomes one of them without a second copy of it."""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from keras import ops

from keras_qwen.ops.quantization_integers import Int4, Int8
from keras_qwen.ops.quantization_nf4 import NormalFloat4

KINDS = {kind.name: kind for kind in (Int8(), Int4(), NormalFloat4())}
"""Each kind has these members; a matrix is (inputs, outputs), its product with a row is taken over `inputs`:

- `name`, `bits`: nominal bits a weight, with the scales.
- `parts(inputs, outputs)`: {name: `Part`}, the arrays that stand for a matrix; "codes" is the first.
- `columns`: quantising a matrix gives the same as quantising pieces of so many columns (or a multiple) each.
- `quantize(matrix)`: {name: numpy array} of a float32 matrix.
- `dequantize(parts, inputs, outputs)`: the matrix they stand for, a float32 tensor, in `keras.ops`.
"""

_PIECE_BYTES = 2 << 20  # of float32 quantised at a time: what it takes on the way stays in the cache


class Quantized(NamedTuple):
    """What is known of a quantised matrix before its values are.

    Attributes:
        kind: name of its kind.
        inputs, outputs: its size.
    """

    kind: str
    inputs: int
    outputs: int

    @property
    def parts(self):
        """{name: `Part`} of the arrays that stand for it."""
        return kind_named(self.kind).parts(self.inputs, self.outputs)

    @property
    def nbytes(self):
        """Bytes that they take."""
        return sum(part.nbytes for part in self.parts.values())

    def dequantize(self, parts):
        """The matrix, a float32 tensor (inputs, outputs).

        Args:
            parts: {name: tensor} of its parts.
        """
        return kind_named(self.kind).dequantize(parts, self.inputs, self.outputs)


def kind_named(name):
    """The kind of a name.

    Raises:
        ValueError: for an unknown one, with the known.
    """
    try:
        return KINDS[name]
    except (KeyError, TypeError):
        raise ValueError(f"quantization={name!r} is not known; known are {', '.join(map(repr, KINDS))}.") from None


def quantize(quantized, read, what="The matrix"):
    """Quantises a matrix in pieces, on several threads.

    Args:
        quantized: a `Quantized`.
        read: `read(start, stop)` returns the columns from `start` to `stop`, a float32 array (inputs, stop - start).
        what: the matrix's name in errors.

    Returns:
        {name: numpy array} of its parts.

    Raises:
        ValueError: if it holds NaN or infinity.

    Example:
        >>> quantized = Quantized("nf4", *matrix.shape)
        >>> parts = quantize(quantized, lambda start, stop: matrix[:, start:stop])
        >>> quantized.dequantize(parts)
    """
    kind = kind_named(quantized.kind)
    inputs, outputs, parts = quantized.inputs, quantized.outputs, quantized.parts
    arrays = {name: np.empty(part.shape, part.dtype) for name, part in parts.items()}
    step = max(1, _PIECE_BYTES // (4 * max(1, inputs)) // kind.columns) * kind.columns

    def piece(start):
        matrix = np.ascontiguousarray(read(start, min(start + step, outputs)), "float32")
        if not np.isfinite(matrix.sum(dtype="float64")):  # a sum of finite float32 numbers is finite in float64
            raise ValueError(f"{what} holds NaN or infinity, which cannot be quantised.")
        for name, values in kind.quantize(matrix).items():
            first = start // parts[name].columns
            arrays[name][..., first : first + values.shape[-1]] = values

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        list(pool.map(piece, range(0, outputs, step)))
    return arrays


def first_value(tensor):
    """A scalar that a function of a tensor may depend on, in place of the whole tensor."""
    return ops.sum(ops.reshape(tensor, (-1,))[:1])


def depending_on(parts, value):
    """The parts of a matrix, not to be had before a scalar is.

    What depends on weights alone, a compiler or a graph's executor may compute at any time, and once for all its uses.
    Where the value is NaN the parts are wrong, so that it has to be one that makes the result NaN, too.
    """
    codes = parts["codes"]
    return {**parts, "codes": ops.bitwise_xor(codes, ops.cast(ops.isnan(value), codes.dtype))}
