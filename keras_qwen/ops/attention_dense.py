"""Attention that makes the whole score matrix: the fastest form for short rows and for decoding."""

import math

import keras
from keras import ops

MASKED = -1e30  # finite: a row without visible keys stays free of NaN, and is zeroed at the end


def dense_attention(query, key, value, *, mask, scale, dropout, seed):
    """Grouped-query attention over the full (length, key_length) matrix; see `attention` for the arguments.

    A group's query heads are laid one behind the other along the length, so that each key/value head takes part in
    one large product and is never repeated.
    """
    batch, length, heads, head_dim = ops.shape(query)
    key_length, kv_heads = ops.shape(key)[1:3]
    groups = heads // kv_heads
    if _exact(query, scale):
        query, scale = query * ops.cast(scale, query.dtype), None
    query = ops.transpose(ops.reshape(query, (batch, length, kv_heads, groups, head_dim)), (0, 2, 3, 1, 4))
    query = ops.reshape(query, (batch, kv_heads, groups * length, head_dim))
    scores = matmul_float32(query, ops.transpose(key, (0, 2, 3, 1)))
    scores = ops.reshape(scores, (batch, kv_heads, groups, length, key_length))
    if scale is not None:
        scores = scores * scale
    if mask is not None:
        scores = ops.where(mask[:, None, None], scores, MASKED)
    probabilities = ops.cast(ops.softmax(scores, axis=-1), value.dtype)
    if dropout:
        probabilities = keras.random.dropout(probabilities, dropout, seed=as_seed(seed))
    probabilities = ops.reshape(probabilities, (batch, kv_heads, groups * length, key_length))
    output = ops.matmul(probabilities, ops.transpose(value, (0, 2, 1, 3)))
    output = ops.reshape(output, (batch, kv_heads, groups, length, head_dim))
    if mask is not None:
        output = ops.where(ops.any(mask, axis=-1)[:, None, None, :, None], output, ops.zeros_like(output))
    return ops.reshape(ops.transpose(output, (0, 3, 1, 2, 4)), (batch, length, heads, head_dim))


def matmul_float32(left, right):
    """Matrix product returned in float32; operands in half precision are not widened where the backend allows it."""
    if keras.backend.backend() == "jax":
        import jax.numpy as jnp

        return jnp.matmul(left, right, preferred_element_type=jnp.float32)
    return ops.cast(ops.matmul(left, right), "float32")


def _exact(query, scale):
    """Whether scaling the (smaller) queries instead of the scores loses nothing: float32, or a power of two."""
    return keras.backend.standardize_dtype(query.dtype) == "float32" or math.frexp(scale)[0] == 0.5


class _DrawnSeed(keras.random.SeedGenerator):
    """Hands a seed that was drawn already to `keras.random`, which accepts integers and generators only."""

    def __init__(self, seed):
        self._seed = seed

    def next(self, ordered=True):
        return self._seed


def as_seed(seed):
    """`seed` in a form that `keras.random` takes: a raw seed tensor (what `SeedGenerator.next` returns) is wrapped."""
    if seed is None or isinstance(seed, (int, keras.random.SeedGenerator)):
        return seed
    return _DrawnSeed(seed)
