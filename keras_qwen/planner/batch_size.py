"""find_batch_size: the largest batch that a model trains with here, estimated, then tried."""

import keras
import numpy as np

from keras_qwen import devices
from keras_qwen.hardware import memory_bytes
from keras_qwen.models.fit_check import setup_of
from keras_qwen.partitioning import batch_shards
from keras_qwen.planner.plan import MemoryPlan


def find_batch_size(model, sequence_length, *, device_memory=None, limit=1024) -> int:
    """The largest batch of rows of a length that a compiled model trains with: the estimate's, confirmed by one step.

    Should the step fail for want of memory, half of it is tried, and so on. The model, its optimizer and the seeds are
    afterwards as before; a copy of what is trained is kept in the host's memory meanwhile.

    Args:
        model: a compiled `QwenCausalLM`, with the memory-saving loss.
        sequence_length: tokens of a row.
        device_memory: as of `keras_qwen.plan`; default, what the accelerator has. Needed on a CPU.
        limit: rows at most.

    Returns:
        Rows of a batch, on all devices together; a multiple of what the mesh splits a batch into.

    Raises:
        ValueError: without `device_memory` where it is not known, and where not even the smallest batch fits.

    Example:
        >>> model.compile(keras.optimizers.AdamW(1e-5))
        >>> batch_size = kq.find_batch_size(model, 2048)
    """
    memory = devices.accelerator_memory() if device_memory is None else memory_bytes(device_memory)
    if memory is None:
        raise ValueError("On a CPU nothing says how much memory to use: give device_memory.")
    distribution = keras.distribution.distribution()
    step = batch_shards(getattr(distribution, "mesh", {}))
    setup = setup_of(model, step, sequence_length)
    if setup is None:
        raise ValueError("Only Keras optimizers that keras_qwen.plan knows, and known dtypes, can be estimated.")
    plan = MemoryPlan.of(setup, memory)
    rows = min(plan.largest("batch_size") or 0, limit // step * step)
    while rows:
        if _trains(model, rows, sequence_length):
            return rows
        rows = rows // 2 // step * step
    raise ValueError(
        f"Not even {step} rows of {sequence_length} tokens fit: {plan.total_bytes / 1e9:.1f} GB are estimated on each "
        f"device. kq.suggest says what would."
    )


def _trains(model, rows, sequence_length):
    """Whether a step of so many rows succeeds; the model is as before afterwards."""
    if not model.optimizer.built:
        model.make_train_function()
    variables = [*model.trainable_variables, *model.optimizer.variables]
    variables += [v for v in model.variables if v.path.endswith("seed_generator_state")]
    before = [keras.ops.convert_to_numpy(variable) for variable in variables]
    ids = np.zeros((rows, sequence_length), "int32")
    try:
        model.train_on_batch({"token_ids": ids}, ids)
        return True
    except (RuntimeError, devices.operation_error()) as problem:
        if not any(word in str(problem).lower() for word in ("resource_exhausted", "out of memory", "oom")):
            raise
        return False
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
        model.reset_metrics()
