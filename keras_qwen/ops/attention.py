"""Grouped-query attention, and the choice among its implementations."""

import keras
from keras import ops

from keras_qwen.ops.attention_backend import backend_module
from keras_qwen.ops.attention_blockwise import Settings, blockwise_attention
from keras_qwen.ops.attention_dense import dense_attention
from keras_qwen.ops.attention_mask import attention_mask

IMPLEMENTATIONS = ("auto", "dense", "blockwise", "flash")

# Up to this length the whole score matrix costs no more time than its blocks do, and less to compile.
DENSE_LENGTH = 512


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
    _check_shapes(query, key, value, segment_ids, key_segment_ids, mask, causal)
    _check_numbers(sliding_window, dropout)
    length, key_length, head_dim = query.shape[1], key.shape[1], query.shape[-1]
    scale = head_dim**-0.5 if scale is None else scale
    chosen = choose_implementation(
        implementation=implementation,
        length=length,
        key_length=key_length,
        dtype=query.dtype,
        head_dim=head_dim,
        has_mask=mask is not None,
        has_key_segments=key_segment_ids is not None,
        dropout=dropout,
    )
    segment_ids = None if segment_ids is None else ops.convert_to_tensor(segment_ids)
    key_segment_ids = segment_ids if key_segment_ids is None else ops.convert_to_tensor(key_segment_ids)
    if chosen == "dense":
        if mask is None and (causal or segment_ids is not None or sliding_window is not None):
            lengths = ops.shape(query)[1], ops.shape(key)[1]
            mask = attention_mask(segment_ids, lengths[0], sliding_window, causal, key_segment_ids=key_segment_ids, key_length=lengths[1])
        return dense_attention(query, key, value, mask=mask, scale=scale, dropout=dropout, seed=seed)
    rule = dict(sliding_window=sliding_window, causal=causal, scale=scale)
    if chosen == "flash":
        return backend_module().flash_attention(query, key, value, segment_ids=segment_ids, **rule)
    settings = Settings(_block_sizes(block_size, query.shape, key_length), **rule)
    return blockwise_attention(
        query, key, value, segment_ids=segment_ids, key_segment_ids=key_segment_ids, settings=settings
    )


def choose_implementation(
    *,
    implementation="auto",
    length=None,
    key_length=None,
    dtype="float32",
    head_dim=None,
    has_mask=False,
    has_key_segments=False,
    dropout=0.0,
    backend=None,
    device=None,
):
    """The implementation that `attention` uses for such a call.

    Args:
        implementation: what was asked for; "auto" leaves the choice open.
        length, key_length: of queries and keys, `None` where they are not known before the call.
        dtype: of the tensors.
        head_dim: size of a head, `None` for one that suits every kernel.
        has_mask, has_key_segments, dropout: as given to `attention`.
        backend: "jax", "tensorflow" or "torch"; default: the one that Keras runs on.
        device: "cpu", "gpu" or "tpu"; default: the one that it computes on.

    Returns:
        "dense", "blockwise" or "flash".

    Raises:
        ValueError: an unknown implementation, or one that cannot do what is asked for.

    Example:
        >>> choose_implementation(length=8192, backend="tensorflow", device="gpu")
        'blockwise'
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"Unknown attention implementation {implementation!r}; known are {', '.join(IMPLEMENTATIONS)}.")
    backend = backend or keras.backend.backend()
    device = device or backend_module().device()
    needs_dense = "an explicit mask" if has_mask else "dropout" if dropout else None
    no_flash = _why_no_flash(backend, device, keras.backend.standardize_dtype(dtype), head_dim, length, has_key_segments)
    if needs_dense:
        if implementation in ("blockwise", "flash"):
            raise ValueError(f"{needs_dense} is implemented in dense attention only, not in {implementation!r}.")
        return "dense"
    if implementation == "flash" and no_flash:
        raise ValueError(f"No flash attention here: {no_flash}. Available are auto, dense and blockwise.")
    if implementation != "auto":
        return implementation
    if no_flash is None and (backend == "torch" or (length or DENSE_LENGTH) >= DENSE_LENGTH):
        return "flash"
    if length is not None and max(length, key_length or length) <= DENSE_LENGTH:
        return "dense"
    return "blockwise"
