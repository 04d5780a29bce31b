"""Checks of a dataset's settings."""

from operator import index


def check_count(name, value, least):
    """Refuse what is not an integer of at least `least`."""
    try:
        number = None if isinstance(value, bool) else index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        raise ValueError(f"{name} must be an integer of at least {least}, not {value!r}")


def check_choice(name, value, choices):
    """Refuse what is not among the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}")


def bucket_lengths_of(given, sequence_length, packing):
    """The lengths that rows have: one with packing, else those given, or by default an eighth, a quarter, half, all.

    Args:
        given: list of int, or None.
        sequence_length: the longest.
        packing: as of `ChatDataset`.

    Returns:
        List of int, ascending; the last is the sequence_length.

    Raises:
        ValueError: the given ones are not ascending up to `sequence_length`, or there is packing.
    """
    if packing is not None:
        if given is not None:
            raise ValueError("bucket_lengths are for packing=None; packed rows have one length")
        return [sequence_length]
    if given is None:
        parts = {-(-sequence_length // part // 8) * 8 for part in (8, 4, 2)}
        return [*sorted(length for length in parts if 0 < length < sequence_length), sequence_length]
    given = list(given)
    for length in given:
        check_count("bucket_lengths", length, 1)
    if given != sorted(set(given)) or not given or given[-1] != sequence_length:
        raise ValueError(f"bucket_lengths must ascend, and end with sequence_length={sequence_length}; got {given}")
    return given
