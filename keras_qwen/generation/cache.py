"""Sizes of prompts and caches, in few enough kinds that each is compiled once."""

import numpy as np
from keras import ops

_SMALLEST = 32


def bucket(length):
    """The length that `length` tokens are padded to: at most 8 sizes between n and 4 n, so at most a quarter padding.

    Example:
        >>> [bucket(n) for n in (1, 32, 33, 130, 1000)]
        [32, 32, 64, 160, 1024]
    """
    step = max(_SMALLEST, 2 ** ((length - 1).bit_length() - 3))
    return -(-length // step) * step


def left_padded(rows, length):
    """Rows of ids as int32 arrays `(token_ids, segment_ids)` (batch, length): padding first, with segment 0."""
    token_ids = np.zeros((len(rows), length), "int32")
    segment_ids = np.zeros_like(token_ids)
    for i, row in enumerate(rows):
        token_ids[i, length - len(row) :] = row
        segment_ids[i, length - len(row) :] = 1
    return token_ids, segment_ids


def decoding_masks(config, starts, index, capacity):
    """Which slots of the cache the token at slot `index` sees.

    Args:
        config: `QwenConfig`.
        starts: int32 (batch,), the first slot of each row that holds no padding.
        index: int32 scalar.
        capacity: number of slots.

    Returns:
        {window: booleans (batch, 1, capacity)} for each sliding window of the config, None for full attention.
    """
    slots = ops.arange(capacity, dtype="int32")[None, None, :]
    seen = ops.logical_and(slots >= ops.expand_dims(starts, (1, 2)), slots <= index)
    windows = {config.window(i) for i in range(config.num_hidden_layers)}
    return {w: seen if w is None else ops.logical_and(seen, slots > index - w) for w in windows}
