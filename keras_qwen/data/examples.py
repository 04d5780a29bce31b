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
    shape = (len(examples), length)
    token_ids = np.full(shape, pad_token_id, "int32")
    labels = np.full(shape, pad_token_id, "int32")
    padding_mask = np.zeros(shape, "int32")
    loss_weights = np.zeros(shape, "float32")
    for row, (example, size) in enumerate(zip(examples, needed, strict=True)):
        ids, mask = example["token_ids"], example["assistant_mask"]
        if len(ids) != len(mask):
            raise ValueError(f"example {row} has {len(ids)} token_ids and {len(mask)} values in its assistant_mask")
        if size > length:
            raise ValueError(
                f"example {row} needs {size} positions, a row has {length}: raise length or shorten the chat"
            )
        token_ids[row, :size] = ids[:-1]
        labels[row, :size] = ids[1:]
        padding_mask[row, :size] = 1
        loss_weights[row, :size] = mask[1:]
    return {"token_ids": token_ids, "padding_mask": padding_mask}, labels, loss_weights
