"""Attention that makes the whole score matrix: the fastest form for short rows and for decoding."""

import math

import keras
from keras import ops

from keras_qwen.ops.attention_backend import backend_module
from keras_qwen.ops.recompute import lean

MASKED = -1e30  # finite: a row without visible keys stays free of NaN, and is zeroed at the end


def dense_attention(query, key, value, *, mask, scale, dropout, seed):
    """Grouped-query attention over the full (length, key_length) matrix; see `attention` for the arguments.

    A group's query heads are laid one behind the other along the length, so that each key/value head takes part in
    one large product and is never repeated.
    """
    backend = backend_module()
    batch, length, heads, head_dim = ops.shape(query)
    key_length, kv_heads = ops.shape(key)[1:3]
    groups = heads // kv_heads
    query_scale, score_scale = split_scale(scale, query.dtype)
    query = ops.transpose(
        ops.reshape(query * query_scale, (batch, length, kv_heads, groups, head_dim)), (0, 2, 3, 1, 4)
    )
    query = ops.reshape(query, (batch, kv_heads, groups * length, head_dim))
    scores = backend.matmul_float32(query, ops.transpose(key, (0, 2, 3, 1)))
    scores = ops.reshape(scores, (batch, kv_heads, groups, length, key_length))
    if score_scale != 1.0:
        scores = scores * score_scale
    if mask is not None:
        # Dimensions by expand_dims: DTensor crashes on a split tensor's [:, None, None].
        scores = ops.where(ops.expand_dims(mask, (1, 2)), scores, MASKED)
    probabilities = ops.cast(lean(_softmax)(scores), value.dtype)
    if dropout:
        probabilities = keras.random.dropout(probabilities, dropout, seed=as_seed(seed))
    probabilities = ops.reshape(probabilities, (batch, kv_heads, groups * length, key_length))
    output = ops.matmul(probabilities, ops.transpose(value, (0, 2, 1, 3)))
    output = ops.reshape(output, (batch, kv_heads, groups, length, head_dim))
    if mask is not None:
        sees = ops.expand_dims(ops.any(mask, axis=-1), (1, 2, 4))
        output = ops.where(sees, output, ops.zeros_like(output))
    return ops.reshape(ops.transpose(output, (0, 3, 1, 2, 4)), (batch, length, heads, head_dim))


def _softmax(scores):
    probabilities = backend_module().softmax(scores)

    def backward(slopes):
        return probabilities * (slopes - ops.sum(slopes * probabilities, axis=-1, keepdims=True))

    return probabilities, backward


def split_scale(scale, dtype):
    """Factors for the queries and for the scores, whose product is `scale`.

    Scaling the queries is cheaper, they are smaller. In half precision it would round them unless `scale` is a power
    of two; the scores are float32.
    """
    exact = keras.backend.standardize_dtype(dtype) == "float32" or math.frexp(scale)[0] == 0.5
    return (scale, 1.0) if exact else (1.0, scale)


class _DrawnSeed(keras.random.SeedGenerator):
    """Hands a seed that was drawn already to `keras.random`, which accepts integers and generators only."""

    _initial_seed = 0  # not None: Keras on torch would leave the seed aside

    def __init__(self, seed):
        self._seed = seed

    def next(self, ordered=True):
        return self._seed


def as_seed(seed):
    """`seed` in a form that `keras.random` takes: a raw seed tensor (what `SeedGenerator.next` returns) is wrapped."""
    if seed is None or isinstance(seed, (int, keras.random.SeedGenerator)):
        return seed
    return _DrawnSeed(seed)
