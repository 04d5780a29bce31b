"""Documents cut to the length of a row."""

TOO_LONG = ("split", "drop", "raise")


def pieces_of(document, sequence_length, too_long):
    """The parts of a document that fit into a row.

    Consecutive parts share a token, the last of the one and the first of the other, so that every label is kept. A part
    without a label to train on is left out.

    Args:
        document: `(token_ids, assistant_mask)`, two sequences of one length.
        sequence_length: positions in a row, one less than the tokens that fit.
        too_long: `"split"`, or something else for documents to stay whole.

    Returns:
        List of `(token_ids, assistant_mask)`, or None for a document that does not fit.
    """
    ids, mask = document
    if len(ids) > sequence_length + 1 and too_long != "split":
        return None
    starts = range(0, max(len(ids) - 1, 0), sequence_length)
    parts = [(ids[i : i + sequence_length + 1], mask[i : i + sequence_length + 1]) for i in starts]
    return [(ids, mask) for ids, mask in parts if any(mask[1:])]
