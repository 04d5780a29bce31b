"""One row times a matrix, which is what decoding does all the time, in the form that the backend is fastest at."""

import functools
import math

import keras
from keras import ops

from keras_qwen.ops.attention_backend import backend_module
from keras_qwen.ops.placement import on_dtensor

_TERMS = {False: 16, True: 8}  # in half precision more make XLA leave its vector instructions
_SMALL = 2**16  # entries; below, there is nothing to win


def row_matmul(row, matrix, transposed=False):
    """`matmul(row, matrix)`, or with the transposed matrix; on CPUs fast for a single row.

    There XLA takes one core for such a product, and converts a matrix in half precision entry by entry before. So does
    TensorFlow with a transposed one. Here the matrix is read once, converted in passing, and summed up in float32.

    Args:
        row: tensor (..., n).
        matrix: tensor (n, m), or (m, n) if `transposed`.
        transposed: whether the matrix is given transposed.

    Returns:
        Tensor (..., m) of the row's dtype.
    """
    form = None
    if math.prod(matrix.shape) >= _SMALL and all(size == 1 for size in row.shape[:-1]):
        form = _FORMS.get((keras.backend.backend(), transposed, _is_half(matrix)))
    if form is None or on_dtensor() or backend_module().device() != "cpu":
        return ops.matmul(row, ops.transpose(matrix) if transposed else matrix)
    product = form(ops.cast(ops.reshape(row, (-1,)), "float32"), matrix)
    return ops.cast(ops.reshape(product, (*row.shape[:-1], -1)), row.dtype)


def _sum_of_slices(vector, matrix):
    """The product as a sum of few products of large slices, which XLA makes one loop that runs on all cores."""
    count, terms = matrix.shape[0], _TERMS[_is_half(matrix)]
    if count % terms:
        return ops.matmul(vector, ops.cast(matrix, "float32"))
    part = count // terms
    slices = (slice(i * part, (i + 1) * part) for i in range(terms))
    products = sum(vector[one, None] * ops.cast(matrix[one], "float32") for one in slices)
    return ops.matmul(ops.ones((1, part), "float32"), products)


def _with_transposed(vector, matrix):
    """Of a product of a vector, XLA makes one loop with the conversion in it."""
    return ops.matmul(vector, ops.cast(ops.transpose(matrix), "float32"))


def _is_half(matrix):
    return keras.backend.standardize_dtype(matrix.dtype) != "float32"


@functools.cache
def _compiled_in_tensorflow():
    import tensorflow as tf

    compiled = tf.function(_with_transposed, jit_compile=True, autograph=False)
    return lambda vector, matrix: compiled(vector, tf.convert_to_tensor(matrix))  # a variable would come in as one


_FORMS = {  # by backend, whether transposed, whether in half precision
    ("jax", False, False): _sum_of_slices,
    ("jax", False, True): _sum_of_slices,
    ("jax", True, True): _with_transposed,
    ("tensorflow", True, True): lambda vector, matrix: _compiled_in_tensorflow()(vector, matrix),
}
