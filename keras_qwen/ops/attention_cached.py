"""Attention of new tokens over the keys and values of all tokens before them, kept in a cache of fixed size."""

import keras
from keras import ops

from keras_qwen.ops.attention_backend import backend_module
from keras_qwen.ops.attention_dense import MASKED, split_scale
from keras_qwen.ops.placement import on_dtensor


def write_cache(cache, new, index):
    """Puts the keys (or values) of new tokens into the cache.

    Args:
        cache: tensor (batch, kv_heads, capacity, head_dim); on TensorFlow it may be a `tf.Variable`, which is changed
            in place.
        new: tensor (batch, length, kv_heads, head_dim).
        index: integer scalar, the slot of the first of them.

    Returns:
        The cache with the new entries.
    """
    new = _heads_first(new)
    if keras.backend.backend() == "tensorflow" and hasattr(cache, "assign"):
        cache[:, :, index : index + new.shape[2]].assign(new)
        return cache
    if on_dtensor():  # which cannot write at an index that is not known before
        slots, length = ops.arange(cache.shape[2], dtype="int32"), new.shape[2]
        if length == 1:
            return ops.where(ops.reshape(slots == index, (1, 1, -1, 1)), new, cache)
        return ops.concatenate([new, cache[:, :, length:]], axis=2)  # the first call, at index 0
    return ops.slice_update(cache, (0, 0, index, 0), new)


def cached_attention(query, keys, values, mask, scale):
    """Grouped-query attention of few queries over a cache.

    The cache lies as the products read it, so that neither it nor a head of it is copied.

    Args:
        query: tensor (batch, length, heads, head_dim).
        keys, values: tensors (batch, kv_heads, capacity, head_dim).
        mask: booleans (batch or 1, length, capacity), True where a query sees a slot; at least one a query.
        scale: of the scores.

    Returns:
        Tensor (batch, length, heads, head_dim).
    """
    batch, length, heads, head_dim = query.shape
    kv_heads, capacity = keys.shape[1:3]
    rows = heads // kv_heads * length
    query_scale, score_scale = split_scale(scale, query.dtype)
    query = ops.reshape(_heads_first(query * query_scale), (batch, kv_heads, rows, head_dim))
    scores = backend_module().matmul_float32(query, ops.convert_to_tensor(keys), transpose_right=True)
    if score_scale != 1.0:
        scores = scores * score_scale
    # The queries of a group lie one behind the other: (groups, length) in one dimension.
    mask = ops.expand_dims(mask, 1)
    mask = mask if length == 1 else ops.tile(mask, (1, 1, heads // kv_heads, 1))
    probabilities = ops.softmax(ops.where(mask, scores, MASKED), axis=-1)
    output = ops.matmul(ops.cast(probabilities, query.dtype), ops.convert_to_tensor(values))
    output = ops.reshape(output, (batch, heads, length, head_dim))
    return _heads_first(output)


def _heads_first(tensor):
    """Swaps the second and third dimensions, without moving anything where one of them is 1."""
    batch, first, second, last = tensor.shape
    if 1 in (first, second):
        return ops.reshape(tensor, (batch, second, first, last))
    return ops.transpose(tensor, (0, 2, 1, 3))
