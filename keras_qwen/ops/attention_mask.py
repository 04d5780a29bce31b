"""Which key each query may see: the mask that causality, a sliding window and segments make together."""

from keras import ops


def attention_mask(
    segment_ids=None, length=None, sliding_window=None, causal=True, *, key_segment_ids=None, key_length=None
):
    """Boolean attention mask of a batch of token sequences.

    Query i may see key j when both hold a token of the same document (`segment_ids`, where 0 is padding and documents
    count from 1), when `j <= i` (`causal`) and when `j > i - sliding_window`. Positions are indices in the row, not
    in the document.

    Args:
        segment_ids: integer tensor (batch, length), or `None` for rows that are one document without padding.
        length: number of tokens a row; needed only without `segment_ids`.
        sliding_window: how many keys a query sees at most, itself included, or `None` for no limit.
        causal: whether later keys are hidden.
        key_segment_ids: segments of the keys (batch, key_length) where they are not those of the queries.
        key_length: number of keys a row, where it is not `length`; needed only without segments.

    Returns:
        Boolean tensor (batch or 1, length, key_length), `True` where the query may see the key.

    Example:

    ```python
    attention_mask(ops.array([[1, 1, 2, 0]]))[0]
    # [[ True, False, False, False],
    #  [ True,  True, False, False],
    #  [False, False,  True, False],
    #  [False, False, False, False]]
    ```
    """
    if segment_ids is None and length is None:
        raise ValueError("attention_mask needs segment_ids or length; both are None.")
    key_segment_ids = segment_ids if key_segment_ids is None else key_segment_ids
    if length is None:
        length = ops.shape(segment_ids)[1]
    if key_length is None:
        key_length = length if key_segment_ids is None else ops.shape(key_segment_ids)[1]
    queries = ops.arange(length, dtype="int32")[None, :, None]
    keys = ops.arange(key_length, dtype="int32")[None, None, :]
    return visible(queries, keys, segment_ids, key_segment_ids, sliding_window, causal)


def visible(queries, keys, segment_ids, key_segment_ids, sliding_window, causal):
    """The rule itself, for indices `queries` (1, q, 1) and `keys` (1, 1, k) and their segments (batch, q or k)."""
    mask = queries >= keys if causal else ops.full_like(queries + keys, True, dtype="bool")
    if sliding_window is not None:
        mask = ops.logical_and(mask, keys > queries - sliding_window)
    if segment_ids is not None:
        segments = ops.expand_dims(segment_ids, 2)
        same = ops.logical_and(segments == ops.expand_dims(key_segment_ids, 1), segments > 0)
        mask = ops.logical_and(mask, same)
    return mask
