"""Packing: many documents in one row, none of which sees another."""

from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np

from keras_qwen.data.examples import fill_rows
from keras_qwen.data.pieces import TOO_LONG, pieces_of
from keras_qwen.data.settings import check_choice

PACKING = ("best_fit", "first_fit")


class Packed(NamedTuple):
    """What `pack` returns.

    Attributes:
        inputs: dict of `token_ids` and `segment_ids` (documents numbered from 1 in each row, 0 = padding), int32 arrays
            (rows, sequence_length).
        labels: int32 array (rows, sequence_length), the token that follows each position in its document.
        loss_weights: float32 array (rows, sequence_length), 1 where the label is trained on.
        fill_rate: the share of positions that hold a token.
        split: documents that were cut.
        dropped: documents that were left out, being too long.
    """

    inputs: dict
    labels: np.ndarray
    loss_weights: np.ndarray
    fill_rate: float
    split: int
    dropped: int


def pack(examples, sequence_length, *, packing="best_fit", too_long="raise", pad_token_id=0):
    """Packs encoded documents into as few rows as it can, shifted: at every position, the label is the next token.

    A document of n tokens takes n - 1 positions, as no token follows the last one. Labels never cross from one document
    to the next, and the model keeps documents of different `segment_ids` apart, each with positions of its own.

    Args:
        examples: sequence of dicts with `token_ids` and `assistant_mask`, as `encode_chat` returns them.
        sequence_length: positions in a row.
        packing: `"best_fit"`: the longest document first, each into the fullest row that has room for it;
            `"first_fit"`: in the order given, each into the first row that has room for it.
        too_long: what becomes of documents that do not fit into a row: `"split"` cuts them (every label is kept, each
            part begins anew), `"drop"` leaves them out, `"raise"` raises.
        pad_token_id: the token id that fills rows up.

    Returns:
        A `Packed`.

    Raises:
        ValueError: there is no example, an example is too long or not valid, or a setting is unknown.

    Example:
        >>> one = {"token_ids": [5, 6, 7], "assistant_mask": [0, 1, 1]}
        >>> packed = pack([one, one], sequence_length=5)
        >>> packed.inputs["segment_ids"].tolist(), packed.fill_rate
        ([[1, 1, 2, 2, 0]], 0.8)
        >>> model.fit(packed.inputs, packed.labels, sample_weight=packed.loss_weights)

    Reference:
        Ding et al., Fewer Truncations Improve Language Modeling (arXiv:2404.10830), for best-fit decreasing.
    """
    check_choice("packing", packing, PACKING)
    check_choice("too_long", too_long, TOO_LONG)
    pieces, split, dropped = [], 0, 0
    for number, example in enumerate(examples):
        if len(example["token_ids"]) != len(example["assistant_mask"]):
            raise ValueError(f"example {number} has token_ids and an assistant_mask of different lengths")
        parts = pieces_of((example["token_ids"], example["assistant_mask"]), sequence_length, too_long)
        if parts is None and too_long == "raise":
            raise ValueError(
                f"example {number} has {len(example['token_ids'])} tokens, a row takes {sequence_length + 1}: raise "
                "sequence_length, or choose too_long='split' or 'drop'"
            )
        dropped += parts is None
        split += len(parts or ()) > 1
        pieces += parts or []
    if not pieces:
        raise ValueError("there is no example to pack")
    lengths = [len(ids) - 1 for ids, _ in pieces]
    rows = [[pieces[i] for i in row] for row in fit_rows(lengths, sequence_length, packing)]
    inputs, labels, loss_weights = fill_rows(rows, sequence_length, pad_token_id, packed=True)
    fill_rate = sum(lengths) / (len(rows) * sequence_length)
    return Packed(inputs, labels, loss_weights, fill_rate, split, dropped)


def fit_rows(lengths, capacity, packing):
    """Which items share a row.

    Args:
        lengths: of the items, each at most the capacity.
        capacity: of a row.
        packing: `"best_fit"` or `"first_fit"`, as in `pack`.

    Returns:
        List of lists of indices. How many there are follows from the set of lengths alone under best fit; under first
        fit, from their order, too.
    """
    return _best_fit(lengths, capacity) if packing == "best_fit" else _first_fit(lengths, capacity)


def _best_fit(lengths, capacity):
    rows, room_of, open_rows, rooms = [], [], {}, []  # open_rows: room left -> rows; rooms: its keys, ascending
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        place = bisect_left(rooms, length)
        if place == len(rooms):
            row = len(rows)
            rows.append([])
            room_of.append(capacity)
        else:
            row = open_rows[rooms[place]].pop()
            if not open_rows[rooms[place]]:
                del open_rows[rooms[place]], rooms[place]
        rows[row].append(index)
        room = room_of[row] = room_of[row] - length
        if room not in open_rows:
            open_rows[room] = []
            insort(rooms, room)
        open_rows[room].append(row)
    return rows


def _first_fit(lengths, capacity):
    rows, rooms = [], np.zeros(len(lengths), "int64")
    for index, length in enumerate(lengths):
        fits = rooms[: len(rows)] >= length
        row = int(fits.argmax()) if fits.any() else len(rows)
        if row == len(rows):
            rows.append([])
            rooms[row] = capacity
        rows[row].append(index)
        rooms[row] -= length
    return rows
