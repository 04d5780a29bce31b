"""Attention in memory linear in the length: online softmax over blocks of keys, made again in the backward pass.

References:
    Milakov & Gimelshein 2018, "Online normalizer calculation for softmax" (arXiv:1805.02867)
    Dao et al. 2022, "FlashAttention" (arXiv:2205.14135)
"""

import dataclasses

from keras import ops

from keras_qwen.ops.attention_backend import (
    call_with_gradient,
    matmul_float32,
    read_block,
    stack_blocks,
    write_block,
    zero_blocks,
)
from keras_qwen.ops.attention_dense import MASKED, split_scale
from keras_qwen.ops.attention_mask import visible

# Where a row's maximum starts: above the masked scores, so that exp(MASKED - maximum) is 0 even if a row sees no key.
LOWEST = MASKED / 10


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the loops need besides tensors; `block_size` counts queries and keys."""

    block_size: tuple[int, int]
    causal: bool
    sliding_window: int | None
    scale: float


def blockwise_attention(query, key, value, *, segment_ids, key_segment_ids, settings):
    """Grouped-query attention that never makes a (length, key_length) matrix; see `attention` for the arguments.

    For each block of queries, a loop runs over the blocks of keys from the first to the last that it can see. The
    forward pass keeps the output and the logarithm of each row's softmax sum; from those the backward pass makes each
    block's probabilities again.
    """
    if segment_ids is None and not settings.causal:  # tells real keys from those added to fill the last block
        segment_ids = ops.ones(ops.shape(query)[:2], dtype="int32")
        key_segment_ids = ops.ones(ops.shape(key)[:2], dtype="int32")
    return call_with_gradient(_forward, _backward, settings, (query, key, value), (segment_ids, key_segment_ids))


def _forward(settings, inputs, segments):
    """Returns the output, and as saved tensors it and each row's log-sum-exp (blocks, batch, kv_heads, rows)."""
    tiles = _Tiles(settings, inputs, segments)
    query, value = inputs[0], inputs[2]

    def add_query_block(i, results):
        outputs, logsumexps = results
        queries = tiles.queries(i)

        def add_key_block(j, state):
            highest, total, output = state
            scores = tiles.scores(queries, i, j)
            new_highest = ops.maximum(highest, ops.max(scores, axis=-1))
            weights = ops.exp(scores - new_highest[..., None])
            shrink = ops.exp(highest - new_highest)
            total = total * shrink + ops.sum(weights, axis=-1)
            weighted = matmul_float32(ops.cast(weights, value.dtype), tiles.keys(tiles.value, j))
            return new_highest, total, output * shrink[..., None] + weighted

        state = ops.full(tiles.row_shape, LOWEST), ops.zeros(tiles.row_shape), ops.zeros(tiles.query_shape)
        highest, total, output = ops.fori_loop(tiles.first[i], tiles.end[i], add_key_block, state)
        total = ops.maximum(total, 1e-30)  # a row that sees no key has output 0
        outputs = write_block(outputs, i, tiles.length_first(output / total[..., None]))
        return outputs, write_block(logsumexps, i, highest + ops.log(total))

    results = tiles.query_blocks(query.dtype), zero_blocks(tiles.counts[0], tiles.row_shape)
    outputs, logsumexps = ops.fori_loop(0, tiles.counts[0], add_query_block, results)
    output = tiles.join(outputs, tiles.lengths[0])
    return output, (output, stack_blocks(logsumexps))


def _backward(settings, inputs, segments, saved, output_gradient):
    """Returns the gradients of query, key and value."""
    tiles = _Tiles(settings, inputs, segments)
    query, key, value = inputs
    logsumexps = saved[1]
    output, output_gradient = (tiles.pad(x, 0) for x in (saved[0], output_gradient))

    def add_query_block(i, gradients):
        query_gradients, *key_value_gradients = gradients
        queries = tiles.queries(i)
        output_gradients = tiles.heads_first(tiles.slice(output_gradient, i, 0))
        outputs = tiles.heads_first(tiles.slice(output, i, 0))
        logsumexp = logsumexps[i][..., None]
        # The softmax's gradient subtracts sum(weights * weights' gradient), which equals this product.
        mean = ops.sum(ops.cast(output_gradients, "float32") * ops.cast(outputs, "float32"), axis=-1, keepdims=True)

        def add_key_block(j, state):
            query_sum, key_gradients, value_gradients = state
            keys, values = tiles.keys(tiles.key, j), tiles.keys(tiles.value, j)
            weights = ops.exp(tiles.scores(queries, i, j) - logsumexp)
            weights_gradient = matmul_float32(output_gradients, ops.swapaxes(values, -1, -2))
            scores_gradient = ops.cast(weights * (weights_gradient - mean), query.dtype)
            weights = ops.cast(weights, value.dtype)
            query_sum = query_sum + matmul_float32(scores_gradient, keys)
            value_sum = matmul_float32(ops.swapaxes(weights, -1, -2), output_gradients)
            key_sum = matmul_float32(ops.swapaxes(scores_gradient, -1, -2), queries)
            key_gradients = write_block(key_gradients, j, read_block(key_gradients, j) + key_sum)
            value_gradients = write_block(value_gradients, j, read_block(value_gradients, j) + value_sum)
            return query_sum, key_gradients, value_gradients

        state = ops.zeros(tiles.query_shape), *key_value_gradients
        query_sum, *key_value_gradients = ops.fori_loop(tiles.first[i], tiles.end[i], add_key_block, state)
        query_sum = tiles.length_first(query_sum * settings.scale)
        return write_block(query_gradients, i, query_sum), *key_value_gradients

    gradients = tiles.query_blocks(query.dtype), tiles.key_blocks(), tiles.key_blocks()
    query_gradients, *key_value_gradients = ops.fori_loop(0, tiles.counts[0], add_query_block, gradients)
    key_gradient, value_gradient = (tiles.join_keys(x) for x in key_value_gradients)
    return (
        tiles.join(query_gradients, tiles.lengths[0]),
        ops.cast(key_gradient * tiles.score_scale, key.dtype),
        ops.cast(value_gradient, value.dtype),
    )
