"""Says before the first step whether training will fit into the device's memory, and what would."""

import dataclasses
import warnings

import keras

from keras_qwen import devices
from keras_qwen.memory_estimate import Setup, estimate, usable
from keras_qwen.parameters import is_adapter_path
from keras_qwen.partitioning import batch_shards


def setup_of(model, batch_size, sequence_length) -> Setup | None:
    """What the memory of a compiled model's step depends on; None for what is not estimated (a Keras loss, say).

    Args:
        model: a compiled `QwenCausalLM`.
        batch_size, sequence_length: of its batches.
    """
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    kind = type(optimizer).__name__.lower()
    if moments := getattr(optimizer, "moments", None):
        kind = f"{kind}-{moments}"
    distribution = keras.distribution.distribution()
    ranks = [v.shape[-1] for v in model.trainable_variables if is_adapter_path(v.path) and v.name == "A"]
    mesh = {} if distribution is None else getattr(distribution, "mesh", None)
    try:
        return Setup(
            config=model.config,
            mesh=mesh,
            batch_size=batch_size,
            sequence_length=sequence_length,
            dtype=model.dtype_policy.name.split("_from_")[-1] if model.quantization else model.dtype_policy.name,
            remat=model.remat,
            optimizer=kind,
            lora_rank=max(ranks) if ranks else None,
            quantization=model.quantization,
            micro_batch_size=None if (model.micro_batch_size or batch_size) >= batch_size else model.micro_batch_size,
            sequence_parallel=getattr(distribution, "sequence_parallel", False),
            shard_optimizer=getattr(distribution, "shard_optimizer", False),
        )
    except (ValueError, TypeError):
        return None


def warn_if_too_large(model, x, batch_size):
    """Warns where the estimate is beyond what an accelerator has, naming what would fit.

    Args:
        model: a compiled model.
        x, batch_size: as given to `fit`.
    """
    rows = _rows(x, batch_size)
    limit = None if rows is None else devices.accelerator_memory()
    setup = None if limit is None else setup_of(model, *rows)
    if setup is None:
        return
    room = usable(limit)
    needed = sum(estimate(setup, room).values())
    if needed <= room:
        return
    fitting = [text for text, other in _alternatives(setup) if sum(estimate(other, room).values()) <= room]
    advice = f"By the same estimate, {' or '.join(fitting[:3])} would fit." if fitting else (
        "Neither remat, micro-batches nor an adapter would make it fit: see kq.suggest."
    )  # fmt: skip
    warnings.warn(
        f"A step of {rows[0]} x {rows[1]} tokens needs about {needed / 1e9:.1f} GB on each device, which has "
        f"{limit / 1e9:.1f} GB. {advice}",
        stacklevel=4,
    )


def _rows(x, batch_size):
    """`(rows, length)` of the batches that `fit` will see, None where the data do not say."""
    ids = x.get("token_ids") if isinstance(x, dict) else x
    shape = getattr(ids, "shape", None)
    if shape is not None and len(shape) == 2:
        return min(batch_size or 32, int(shape[0])), int(shape[1])
    rows, length = getattr(x, "batch_size", None), getattr(x, "sequence_length", None)
    return (rows, length) if isinstance(rows, int) and isinstance(length, int) else None


def _alternatives(setup):
    """`(what to say, setup)`, the least painful first."""
    if setup.remat is None:
        yield "remat='block'", dataclasses.replace(setup, remat="block")
    shards, rows = batch_shards(setup.mesh), setup.micro_batch_size or setup.batch_size
    smaller = [n for n in range(rows - 1, 0, -1) if setup.batch_size % n == 0 and n % shards == 0]
    for n in smaller:
        yield f"remat='block', micro_batch_size={n}", dataclasses.replace(setup, remat="block", micro_batch_size=n)
    if setup.lora_rank is None:
        small = {"remat": "block", "micro_batch_size": smaller[-1] if smaller else setup.micro_batch_size}
        eight = dataclasses.replace(setup, optimizer="adamw-int8", **small)
        yield "that with kq.training.AdamW(moments='int8')", eight
        yield "enable_lora(16)", dataclasses.replace(setup, lora_rank=16, **small)
        yield (
            "enable_lora(16) on quantization='nf4'",
            dataclasses.replace(setup, lora_rank=16, quantization="nf4", **small),
        )
