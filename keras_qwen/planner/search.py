"""The largest setting that still fits."""

from keras_qwen.partitioning import batch_shards
from keras_qwen.planner.published import NAMES, published

_LENGTH_STEP = 128


def largest(plan, what):
    """See `MemoryPlan.largest`."""
    if plan.device_memory is None:
        raise ValueError("largest needs to know device_memory.")
    if what == "model":
        fitting = [name for name in NAMES if plan.replaced(config=published(name)).fits]
        return fitting[-1] if fitting else None
    if what == "batch_size":
        if plan.setup.micro_batch_size is not None:
            raise ValueError("With a micro_batch_size, memory does not depend on batch_size: any fits, or none.")
        step = batch_shards(plan.setup.mesh)
    elif what == "sequence_length":
        step = _LENGTH_STEP
    else:
        raise ValueError(f"largest takes 'batch_size', 'sequence_length' or 'model', not {what!r}.")
    count = _last(lambda count: plan.replaced(**{what: count * step}).fits)
    return count * step or None


def _last(fits):
    """The last count from 1 on for which a condition holds that holds up to some count; 0 if it never does."""
    low, high = 0, 1
    while fits(high) and high < 2**30:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
