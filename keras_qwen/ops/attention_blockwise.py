"""Attention in memory linear in the length: online softmax over blocks of keys, made again in the backward pass.

References:
    Milakov & Gimelshein 2018, "Online normalizer calculation for softmax" (arXiv:1805.02867)
    Dao et al. 2022, "FlashAttention" (arXiv:2205.14135)
"""

from typing import NamedTuple

from keras import ops

from keras_qwen.ops.attention_backend import backend_module
from keras_qwen.ops.attention_dense import MASKED, split_scale
from keras_qwen.ops.attention_mask import visible

# Where a row's maximum starts: above the masked scores, so that exp(MASKED - maximum) is 0 even if a row sees no key.
LOWEST = MASKED / 10


class Settings(NamedTuple):
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
    if segment_ids is None and not settings.causal:  # tells real keys from those that fill up the last block
        segment_ids = ops.ones(ops.shape(query)[:2], dtype="int32")
        key_segment_ids = ops.ones(ops.shape(key)[:2], dtype="int32")
    segments = segment_ids, key_segment_ids
    return backend_module().call_with_gradient(_forward, _backward, settings, (query, key, value), segments)


def _forward(settings, inputs, segments):
    """The output, and beside it what the gradient needs: the output and each row's log-sum-exp, in blocks."""
    backend = backend_module()
    pairs = _Pairs(settings, inputs, segments)
    block_shape = pairs.queries.block_shape
    row_shape = block_shape[:-1]

    def query_block(i, results):
        outputs, logsumexps = results
        queries = pairs.scaled_queries(i)

        def key_block(j, state):
            highest, total, output = state
            scores = pairs.scores(queries, i, j)
            new_highest = ops.maximum(highest, ops.max(scores, axis=-1))
            weights = ops.exp(scores - new_highest[..., None])
            shrink = ops.exp(highest - new_highest)
            values = pairs.values[j]
            total = total * shrink + ops.sum(weights, axis=-1)
            output = output * shrink[..., None] + backend.matmul_float32(ops.cast(weights, values.dtype), values)
            return new_highest, total, output

        output = ops.zeros_like(queries, dtype="float32")
        total = output[..., 0]
        state = total + LOWEST, total, output
        highest, total, output = ops.fori_loop(pairs.first[i], pairs.end[i], key_block, state)
        total = ops.maximum(total, 1e-30)  # a row that sees no key: its output is 0
        outputs = backend.write_block(outputs, i, ops.cast(output / total[..., None], queries.dtype))
        return outputs, backend.write_block(logsumexps, i, highest + ops.log(total))

    count = pairs.queries.count
    results = backend.zero_blocks(count, block_shape, inputs[0].dtype), backend.zero_blocks(count, row_shape)
    outputs, logsumexps = ops.fori_loop(0, count, query_block, results)
    output = pairs.queries.join(outputs)
    return output, (output, backend.stack_blocks(logsumexps))


def _backward(settings, inputs, segments, saved, output_gradient):
    """The gradients of query, key and value."""
    backend = backend_module()
    pairs = _Pairs(settings, inputs, segments)
    logsumexps = saved[1]

    def add_to_block(blocks, j, values):
        return backend.write_block(blocks, j, backend.read_block(blocks, j) + values)

    outputs, output_gradients = (_Blocks(x, pairs.queries.size, pairs.kv_heads) for x in (saved[0], output_gradient))

    def query_block(i, gradients):
        query_gradients, *key_value_gradients = gradients
        queries, output, output_gradient = pairs.scaled_queries(i), outputs[i], output_gradients[i]
        logsumexp = logsumexps[i][..., None]
        # The softmax's gradient subtracts each row's sum of weight * weight's gradient, which equals this product.
        mean = ops.sum(ops.cast(output, "float32") * ops.cast(output_gradient, "float32"), axis=-1, keepdims=True)

        def key_block(j, state):
            query_sum, key_sums, value_sums = state
            keys, values = pairs.keys[j], pairs.values[j]
            weights = ops.exp(pairs.scores(queries, i, j) - logsumexp)
            weights_gradient = backend.matmul_float32(output_gradient, values, transpose_right=True)
            scores_gradient = ops.cast(weights * (weights_gradient - mean), queries.dtype)
            weights = ops.cast(weights, queries.dtype)
            query_sum = query_sum + backend.matmul_float32(scores_gradient, keys)
            key_sum = backend.matmul_float32(scores_gradient, queries, transpose_left=True)
            value_sum = backend.matmul_float32(weights, output_gradient, transpose_left=True)
            return query_sum, add_to_block(key_sums, j, key_sum), add_to_block(value_sums, j, value_sum)

        state = ops.zeros_like(queries, dtype="float32"), *key_value_gradients
        query_sum, *key_value_gradients = ops.fori_loop(pairs.first[i], pairs.end[i], key_block, state)
        query_sum = ops.cast(query_sum * settings.scale, queries.dtype)
        return backend.write_block(query_gradients, i, query_sum), *key_value_gradients

    key_value_sums = (backend.zero_blocks(pairs.keys.count, pairs.keys.block_shape) for _ in range(2))
    gradients = backend.zero_blocks(pairs.queries.count, pairs.queries.block_shape, inputs[0].dtype), *key_value_sums
    query_gradients, key_sums, value_sums = ops.fori_loop(0, pairs.queries.count, query_block, gradients)
    key_gradient = pairs.keys.join(key_sums) * pairs.score_scale
    value_gradient = pairs.values.join(value_sums)
    return pairs.queries.join(query_gradients), *(ops.cast(x, inputs[1].dtype) for x in (key_gradient, value_gradient))


class _Pairs:
    """The blocks of one call's tensors, and which pairs (query block, key block) have anything to compute."""

    def __init__(self, settings, inputs, segments):
        query, key, value = inputs
        query_size, key_size = settings.block_size
        self.settings = settings
        self.kv_heads = key.shape[2]
        self.queries = _Blocks(query, query_size, self.kv_heads)
        self.keys = _Blocks(key, key_size, self.kv_heads)
        self.values = _Blocks(value, key_size, self.kv_heads)
        self.query_scale, self.score_scale = split_scale(settings.scale, query.dtype)
        self.segments, self.key_segments = segments
        if self.segments is not None:
            self.segments = _fill_up(self.segments, query_size)
            self.key_segments = _fill_up(self.key_segments, key_size)
        self.first, self.end = self._ranges()

    def scaled_queries(self, i):
        return self.queries[i] * self.query_scale

    def scores(self, queries, i, j):
        """Masked float32 scores (batch, kv_heads, groups * query_size, key_size) of query block i with key block j."""
        scores = backend_module().matmul_float32(queries, self.keys[j], transpose_right=True)
        if self.score_scale != 1.0:
            scores = scores * self.score_scale
        query_size, key_size = self.settings.block_size
        mask = visible(
            (i * query_size + ops.arange(query_size, dtype="int32"))[None, :, None],
            (j * key_size + ops.arange(key_size, dtype="int32"))[None, None, :],
            None if self.segments is None else backend_module().slice_block(self.segments, i, query_size),
            None if self.segments is None else backend_module().slice_block(self.key_segments, j, key_size),
            self.settings.sliding_window,
            self.settings.causal,
        )
        shape = ops.shape(scores)
        grouped = ops.reshape(scores, (*shape[:2], -1, query_size, key_size))
        return ops.reshape(ops.where(mask[:, None, None], grouped, MASKED), shape)

    def _ranges(self):
        """For each query block the first key block that it needs, and the one after the last (both 0: none)."""
        query_size, key_size = self.settings.block_size
        query_start = ops.arange(self.queries.count, dtype="int32")[:, None] * query_size
        key_start = ops.arange(self.keys.count, dtype="int32")[None, :] * key_size
        alive = query_start + key_start >= 0  # all of them
        if self.settings.causal:
            alive = key_start < query_start + query_size
        if self.settings.sliding_window is not None:
            alive = ops.logical_and(alive, key_start + key_size > query_start + 1 - self.settings.sliding_window)
        if self.segments is not None:
            query_lowest, query_highest = _segment_range(self.segments, query_size)
            key_lowest, key_highest = _segment_range(self.key_segments, key_size)
            shared = ops.logical_and(
                query_lowest[:, :, None] <= key_highest[:, None, :], key_lowest[:, None, :] <= query_highest[:, :, None]
            )
            alive = ops.logical_and(alive, ops.any(shared, axis=0))
        alive = ops.cast(alive, "int32")
        end = self.keys.count - ops.argmax(ops.flip(alive, axis=1), axis=1)
        return ops.cast(ops.argmax(alive, axis=1), "int32"), ops.cast(end, "int32") * ops.max(alive, axis=1)


class _Blocks:
    """A tensor (batch, length, heads, head_dim) in blocks of `size` tokens.

    `blocks[i]` is (batch, kv_heads, groups * size, head_dim): the heads of a group lie one behind the other, so that
    all of them meet their key/value head in one product. The last block is filled up with zeros.
    """

    def __init__(self, tensor, size, kv_heads):
        batch, self.length, self.heads, head_dim = ops.shape(tensor)
        self.size, self.kv_heads = size, kv_heads
        self.tensor = _fill_up(tensor, size)
        self.count = -(-self.length // size)
        self.block_shape = (batch, kv_heads, self.heads // kv_heads * size, head_dim)

    def __getitem__(self, i):
        _, kv_heads, rows, head_dim = self.block_shape
        block = ops.reshape(
            backend_module().slice_block(self.tensor, i, self.size),
            (-1, self.size, kv_heads, rows // self.size, head_dim),
        )
        return ops.reshape(ops.transpose(block, (0, 2, 3, 1, 4)), (-1, kv_heads, rows, head_dim))

    def join(self, blocks):
        """What `zero_blocks` and `write_block` collected for all blocks, as (batch, length, heads, head_dim)."""
        batch, _, _, head_dim = self.block_shape
        blocks = ops.reshape(
            backend_module().stack_blocks(blocks), (self.count, batch, self.kv_heads, -1, self.size, head_dim)
        )
        tensor = ops.transpose(blocks, (1, 0, 4, 2, 3, 5))
        return ops.reshape(tensor, (batch, -1, self.heads, head_dim))[:, : self.length]


def _fill_up(tensor, size):
    """`tensor` (batch, length, ...) with zeros appended until `size` divides its length."""
    batch, length, *rest = ops.shape(tensor)
    missing = -length % size
    if isinstance(missing, int) and missing == 0:
        return tensor
    return ops.concatenate([tensor, ops.zeros((batch, missing, *rest), dtype=tensor.dtype)], axis=1)


def _segment_range(segments, size):
    """Lowest and highest segment (batch, blocks) of each block; of padding alone, a range that meets no other."""
    blocks = ops.reshape(segments, (ops.shape(segments)[0], -1, size))
    lowest = ops.min(ops.where(blocks > 0, blocks, 2**31 - 1), axis=2)
    return lowest, ops.max(blocks, axis=2)
