"""Grouped-query attention, and the choice between its implementations."""

from keras import ops

from keras_qwen.ops.attention_dense import dense_attention
from keras_qwen.ops.attention_mask import attention_mask


def attention(
    query,
    key,
    value,
    *,
    segment_ids=None,
    key_segment_ids=None,
    mask=None,
    sliding_window=None,
    causal=True,
    scale=None,
    dropout=0.0,
    seed=None,
    implementation="auto",
    block_size=None,
):
    head_dim = query.shape[-1]
    scale = head_dim**-0.5 if scale is None else scale
    if mask is None and (causal or segment_ids is not None or sliding_window is not None):
        mask = attention_mask(
            segment_ids, ops.shape(query)[1], sliding_window, causal, key_segment_ids=key_segment_ids
        )
    return dense_attention(query, key, value, mask=mask, scale=scale, dropout=dropout, seed=seed)


def choose_implementation(**kwargs):
    return "dense"
