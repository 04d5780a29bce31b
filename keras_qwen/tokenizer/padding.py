"""Rows of unequal length, as one array."""

import numpy as np


def pad_rows(rows, pad_token_id, *, length=None, padding_side="right", truncation=None):
    """Put rows of token ids into one array.

    Args:
        rows: list of lists of ids.
        pad_token_id: id that fills up the shorter rows; None raises if one is needed.
        length: ids in a row of the array; by default as many as the longest row has.
        padding_side: "right" for training, "left" for prompts.
        truncation: which side of a row longer than `length` to cut off: "right", "left", or None to raise.

    Returns:
        Dict of `token_ids` and `padding_mask` (1 = real token), int32 arrays of shape (batch, length).

    Raises:
        ValueError: no rows, a row longer than length, or no padding token.

    Example:
        >>> pad_rows([[5], [6, 7]], 0, padding_side="left")["token_ids"].tolist()
        [[0, 5], [6, 7]]
    """
    if padding_side not in ("right", "left"):
        raise ValueError(f'padding_side must be "right" or "left", not {padding_side!r}')
    if truncation not in ("right", "left", None):
        raise ValueError(f'truncation must be "right", "left" or None, not {truncation!r}')
    if not rows:
        raise ValueError("there are no rows to put into a batch")
    sizes = [len(row) for row in rows]
    length = max(sizes) if length is None else length
    if max(sizes) > length and truncation is None:
        index = next(i for i, size in enumerate(sizes) if size > length)
        raise ValueError(
            f"row {index} has {sizes[index]} tokens, more than length={length}: "
            'raise length, or pass truncation="right" or "left"'
        )
    if min(sizes) < length and pad_token_id is None:
        raise ValueError("rows of unequal length need a padding token: set pad_token in tokenizer_config.json")
    token_ids = np.full((len(rows), length), pad_token_id or 0, "int32")
    padding_mask = np.zeros_like(token_ids)
    for i, row in enumerate(rows):
        row = row[max(0, len(row) - length) :] if truncation == "left" else row[:length]
        columns = slice(0, len(row)) if padding_side == "right" else slice(length - len(row), length)
        token_ids[i, columns], padding_mask[i, columns] = row, 1
    return {"token_ids": token_ids, "padding_mask": padding_mask}
