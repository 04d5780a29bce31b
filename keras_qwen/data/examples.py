"""Turns encoded chats into the arrays that `fit` takes."""

import numpy as np


def next_token_arrays(examples, length=None, pad_token_id=0):
    """Lays encoded chats side by side, one a row, and shifts them: at every position, the label is the next token.

    Position t of a row holds token t, the label token t + 1, and the loss weight is 1 where token t + 1 was produced
    by the assistant. A row is one shorter than its chat, as no token follows the last one; the rest of it is padding
    of weight 0.

    Args:
        examples: a sequence of dicts with `token_ids` and `assistant_mask`, as `encode_chat` returns them.
        length: the length of a row. By default, what the longest example needs.
        pad_token_id: the token id that fills a row up.

    Returns:
        `(inputs, labels, loss_weights)`: `inputs` a dict of `token_ids` and `padding_mask`, all of them arrays of shape
        (len(examples), length), int32 but for the float32 weights.

    Raises:
        ValueError: there is no example, its ids and mask differ in length, or an example does not fit into `length`.

    Example:
        >>> example = {"token_ids": [5, 6, 7, 8], "assistant_mask": [0, 0, 1, 1]}
        >>> inputs, labels, loss_weights = next_token_arrays([example], length=4)
        >>> inputs["token_ids"].tolist(), labels.tolist(), loss_weights.tolist()
        ([[5, 6, 7, 0]], [[6, 7, 8, 0]], [[0.0, 1.0, 1.0, 0.0]])
    """
    if not len(examples):
        raise ValueError("there is no example to train on")
    needed = [len(example["token_ids"]) - 1 for example in examples]
    length = max(needed) if length is None else length
    for row, (example, size) in enumerate(zip(examples, needed, strict=True)):
        ids, mask = example["token_ids"], example["assistant_mask"]
        if len(ids) != len(mask):
            raise ValueError(f"example {row} has {len(ids)} token_ids and {len(mask)} values in its assistant_mask")
        if size > length:
            raise ValueError(
                f"example {row} needs {size} positions, a row has {length}: raise length or shorten the chat"
            )
    rows = [[(example["token_ids"], example["assistant_mask"])] for example in examples]
    return fill_rows(rows, length, pad_token_id, packed=False)


def fill_rows(rows, length, pad_token_id, packed):
    """Lay documents one after the other into rows, and shift them.

    Args:
        rows: list of rows, each a list of documents `(token_ids, assistant_mask)`; a document of n tokens takes n - 1
            positions.
        length: positions in a row.
        pad_token_id: fills rows up.
        packed: whether inputs have `segment_ids`, documents numbered from 1 in each row, or a `padding_mask`.

    Returns:
        `(inputs, labels, loss_weights)`, as `next_token_arrays` returns them.
    """
    shape = (len(rows), length)
    token_ids, labels = np.full(shape, pad_token_id, "int32"), np.full(shape, pad_token_id, "int32")
    segment_ids, loss_weights = np.zeros(shape, "int32"), np.zeros(shape, "float32")
    for row, documents in enumerate(rows):
        start = 0
        for segment, (ids, mask) in enumerate(documents, start=1):
            end = start + len(ids) - 1
            token_ids[row, start:end] = ids[:-1]
            labels[row, start:end] = ids[1:]
            segment_ids[row, start:end] = segment
            loss_weights[row, start:end] = mask[1:]
            start = end
    mask = {"segment_ids": segment_ids} if packed else {"padding_mask": segment_ids}
    return {"token_ids": token_ids, **mask}, labels, loss_weights
