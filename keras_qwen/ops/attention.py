"""Grouped-query attention, and the choice among its implementations."""

import keras
from keras import ops

from keras_qwen.ops.attention_backend import backend_module
from keras_qwen.ops.attention_blockwise import Settings, blockwise_attention
from keras_qwen.ops.attention_choice import choose_block_sizes, choose_implementation
from keras_qwen.ops.attention_dense import dense_attention
from keras_qwen.ops.attention_mask import attention_mask
from keras_qwen.ops.placement import for_each_device


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
    """Scaled dot-product attention in which groups of query heads share a key/value head.

    Query head h uses key/value head `h // (heads // kv_heads)`; keys and values are not repeated. Scores and softmax
    are float32 under every dtype.

    Three implementations give the same numbers: "dense" makes the (length, key_length) matrix of all heads;
    "blockwise" keeps memory linear in the length, in the backward pass too, and does not compute blocks that
    causality, window or segments exclude; "flash" is the backend's fused kernel (JAX on a GPU in half precision or on
    a TPU; torch). "auto" takes the fastest that can do what is asked for, see `choose_implementation`.

    Args:
        query: tensor (batch, length, heads, head_dim).
        key, value: tensors (batch, key_length, kv_heads, head_dim); `kv_heads` divides `heads`.
        segment_ids: integers (batch, length); documents packed in a row are numbered from 1, 0 is padding. A token
            sees tokens of its own segment alone. The output for padding is 0.
        key_segment_ids: integers (batch, key_length), where they are not `segment_ids`.
        mask: boolean (batch or 1, length, key_length), True where the query sees the key. It takes the place of
            `segment_ids`, `sliding_window` and `causal`, and is what decoding with a cache needs. Dense only.
        sliding_window: how many keys a query sees, itself included: those at index `i - sliding_window + 1` or later.
        causal: whether a query sees no later key; by index in the row, so that `length` has to equal `key_length`.
        scale: factor of the scores; default `head_dim ** -0.5`.
        dropout: rate of dropout on the softmax's result. Dense only.
        seed: integer, `keras.random.SeedGenerator`, or a seed tensor that one has drawn already.
        implementation: "auto", "dense", "blockwise" or "flash".
        block_size: tokens in a block of "blockwise", one integer or a pair (queries, keys); default: by device.

    Returns:
        Tensor (batch, length, heads, head_dim) in the dtype of `query`.

    Raises:
        ValueError: shapes that do not fit; an unknown implementation, or one that cannot do what is asked for; a
            window, rate or block size out of range.

    Example:
        >>> query = keras.random.normal((1, 6, 4, 8))
        >>> key, value = keras.random.normal((2, 1, 6, 2, 8))
        >>> attention(query, key, value, segment_ids=keras.ops.array([[1, 1, 1, 2, 2, 0]])).shape
        (1, 6, 4, 8)

    References: Ainslie et al., 2023, "GQA", arXiv:2305.13245; Milakov and Gimelshein, 2018, "Online normalizer
    calculation for softmax", arXiv:1805.02867; Dao et al., 2022, "FlashAttention", arXiv:2205.14135.
    """
    query, key, value = (ops.convert_to_tensor(x) for x in (query, key, value))
    segment_ids, key_segment_ids, mask = (
        None if x is None else ops.convert_to_tensor(x, dtype=dtype)
        for x, dtype in ((segment_ids, "int32"), (key_segment_ids, "int32"), (mask, "bool"))
    )
    _check_tensors(query, key, value, segment_ids, key_segment_ids, mask, causal)
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be 1 or more, not {sliding_window}.")
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout must be in [0, 1), not {dropout}.")
    chosen = choose_implementation(
        implementation=implementation,
        length=query.shape[1],
        key_length=key.shape[1],
        dtype=query.dtype,
        head_dim=query.shape[-1],
        has_mask=mask is not None,
        has_key_segments=key_segment_ids is not None,
        dropout=dropout,
    )
    if key_segment_ids is None:
        key_segment_ids = segment_ids
    rule = dict(sliding_window=sliding_window, causal=causal)
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    if chosen == "dense":
        if mask is None and (causal or segment_ids is not None or sliding_window is not None):
            lengths = dict(length=ops.shape(query)[1], key_length=ops.shape(key)[1])
            mask = attention_mask(segment_ids, key_segment_ids=key_segment_ids, **lengths, **rule)
        return dense_attention(query, key, value, mask=mask, scale=scale, dropout=dropout, seed=seed)

    def on_a_device(query, key, value, segment_ids, key_segment_ids):
        if chosen == "flash":
            return backend_module().flash_attention(query, key, value, segment_ids=segment_ids, scale=scale, **rule)
        settings = Settings(choose_block_sizes(block_size, query.shape, key.shape[1]), scale=scale, **rule)
        segments = dict(segment_ids=segment_ids, key_segment_ids=key_segment_ids)
        return blockwise_attention(query, key, value, **segments, settings=settings)

    return for_each_device(on_a_device, query, key, value, segment_ids, key_segment_ids)


def _check_tensors(query, key, value, segment_ids, key_segment_ids, mask, causal):
    query_shape, key_shape = tuple(query.shape), tuple(key.shape)
    if not len(query_shape) == len(key_shape) == len(value.shape) == 4:
        raise ValueError(
            "attention takes tensors (batch, length, heads, head_dim), but got "
            f"query {query_shape}, key {key_shape}, value {tuple(value.shape)}."
        )
    if not (_fit(key_shape, value.shape) and _fit(query_shape[::3], key_shape[::3])):
        raise ValueError(
            "query, key and value must have the same batch and head_dim, key and value the same length and heads, but "
            f"got query {query_shape}, key {key_shape}, value {tuple(value.shape)}."
        )
    if query_shape[2] % key_shape[2]:
        raise ValueError(f"{query_shape[2]} query heads are no multiple of {key_shape[2]} key/value heads.")
    if len({keras.backend.standardize_dtype(x.dtype) for x in (query, key, value)}) > 1:
        raise ValueError(f"query, key and value have different dtypes: {query.dtype}, {key.dtype}, {value.dtype}.")
    batch, length, key_length = query_shape[0], query_shape[1], key_shape[1]
    if mask is not None:
        if (
            len(mask.shape) != 3
            or not _fit(mask.shape[1:], (length, key_length))
            or mask.shape[0] not in (1, batch, None)
        ):
            raise ValueError(
                f"mask must have the shape (batch or 1, length, key_length), here {(batch, length, key_length)}, "
                f"not {tuple(mask.shape)}."
            )
        return
    if segment_ids is None and key_segment_ids is not None:
        raise ValueError("key_segment_ids needs segment_ids.")
    expected = {"segment_ids": (segment_ids, length), "key_segment_ids": (key_segment_ids, key_length)}
    for name, (segments, count) in expected.items():
        if segments is not None and not _fit(segments.shape, (batch, count)):
            raise ValueError(f"{name} must have the shape {(batch, count)}, not {tuple(segments.shape)}.")
    if not _fit((length,), (key_length,)) and (causal or (segment_ids is not None and key_segment_ids is None)):
        raise ValueError(
            f"{length} queries and {key_length} keys: which key belongs to which query is not known. Give a mask "
            "(batch or 1, length, key_length), or causal=False and, with segment_ids, key_segment_ids."
        )


def _fit(shape, other):
    """Whether two shapes agree wherever both are known."""
    return len(shape) == len(other) and all(a == b or None in (a, b) for a, b in zip(shape, other, strict=True))
