"""A place in a dataset, as it is saved, and what has to be the same when it is taken up again."""

_KEYS = {"epoch", "batch", "fingerprint"}


def check_state(state, fingerprint):
    """Refuse a state of another dataset.

    Args:
        state: of `ChatDataset.get_state`.
        fingerprint: of the dataset that is to take it up.

    Raises:
        ValueError: it is no state, or names what differs, before and now.
    """
    if not isinstance(state, dict) or not _KEYS <= state.keys():
        raise ValueError(f"a state of ChatDataset has {', '.join(sorted(_KEYS))}; this is {str(state)[:80]!r}")
    before = state["fingerprint"]
    different = [
        f"{name} was {before.get(name)!r}, is {fingerprint.get(name)!r}"
        for name in sorted({*before, *fingerprint})
        if before.get(name) != fingerprint.get(name)
    ]
    if different:
        raise ValueError(
            "the position belongs to another dataset: " + "; ".join(different) + ". Give it what it was saved with, or "
            "begin anew without set_state"
        )


def global_number(state, batches_per_epoch):
    """The number of a state's next batch, counted from the first of epoch 0."""
    return state["epoch"] * batches_per_epoch + state["batch"]
