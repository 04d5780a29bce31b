"""Groups of a column's entries, and two codes of 4 bits in a byte.

A byte holds entries i and i + 32 of a group of 64: taking them apart gives two whole runs of rows, nothing is
interleaved, and each group is for itself, so that both dimensions of the packed matrix may be split over devices.
"""

import dataclasses
import math

import numpy as np
from keras import ops

GROUP = 64
"""Entries of a column that share a scale; also the blocks of Dettmers et al., 2023, arXiv:2305.14314."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One of the arrays that stand for a matrix.

    Attributes:
        shape, dtype: of the array.
        columns: how many of the matrix's columns one entry of the last dimension stands for.
    """

    shape: tuple[int, ...]
    dtype: str
    columns: int = 1

    @property
    def nbytes(self):
        """Its bytes."""
        return math.prod(self.shape) * (2 if self.dtype == "bfloat16" else np.dtype(self.dtype).itemsize)


def groups_of(inputs):
    """How many groups a column has; the last may be smaller."""
    return -(-inputs // GROUP)


def grouped(matrix):
    """A matrix (inputs, columns) as (groups, 64, columns); a smaller last group is filled up with its last entry."""
    missing = -len(matrix) % GROUP
    if missing:
        matrix = np.concatenate([matrix, np.repeat(matrix[-1:], missing, axis=0)])
    return matrix.reshape(-1, GROUP, matrix.shape[1])


def ungrouped(groups, inputs):
    """The way back, of a tensor."""
    matrix = ops.reshape(groups, (-1, groups.shape[-1]))
    return matrix if matrix.shape[0] == inputs else matrix[:inputs]


def pack(codes):
    """Codes (groups, 64, columns) below 16 as bytes (groups * 32, columns)."""
    packed = codes[:, : GROUP // 2] | codes[:, GROUP // 2 :] << 4
    return packed.reshape(-1, codes.shape[-1])


def unpack(packed):
    """The way back, of a tensor."""
    packed = ops.reshape(packed, (-1, GROUP // 2, packed.shape[-1]))
    low, high = ops.bitwise_and(packed, ops.cast(15, "uint8")), ops.right_shift(packed, ops.cast(4, "uint8"))
    return ops.concatenate([low, high], axis=1)
