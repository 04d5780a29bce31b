"""suggest: which mesh, remat, micro-batch and method to train with, the fastest that fits first."""

import dataclasses
import itertools

from keras_qwen.hardware import accelerator
from keras_qwen.memory_estimate import Setup
from keras_qwen.partitioning import batch_shards
from keras_qwen.planner.plan import MemoryPlan, plan
from keras_qwen.planner.tables import suggestions_table

METHODS = {"full": {}, "lora": {"lora_rank": 16}, "qlora": {"lora_rank": 16, "quantization": "nf4"}}
_ASSUMED = "A100"  # where the device is not named
# What is reached of the peak, and what unpacking NF4 costs each product; rough, but the same for all that is compared.
_UTILIZATION, _UNPACKING = 0.5, 1.3
_LONELY_TOKENS = 512  # on so many tokens at once, a device takes twice the time for each


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """One way to train.

    Attributes:
        method: `"full"`, `"lora"` or `"qlora"`.
        plan: its `MemoryPlan`.
        seconds: predicted for a step, to compare suggestions by.
    """

    method: str
    plan: MemoryPlan
    seconds: float


class Suggestions(list):
    """A list of `Suggestion`, the fastest first; prints as a table."""

    def __str__(self):
        return suggestions_table(self)


def suggest(
    config,
    *,
    devices,
    device_memory,
    batch_size=8,
    sequence_length=4096,
    methods=("full", "lora", "qlora"),
    dtype="mixed_bfloat16",
    optimizer="adamw",
    best=10,
) -> Suggestions:
    """Ranks what fits by predicted step time.

    Tried are all meshes of `data`, `fsdp` and `model` over the devices (`model` up to 8, where it divides the heads),
    remat, micro-batches and methods. The time is that of the arithmetic at half of the device's peak, recomputing and
    small micro-batches counted, and of what is sent, counted on paper; nothing overlaps. It is for comparing.

    Args:
        config: a `QwenConfig`.
        devices: how many there are.
        device_memory: as of `plan`; a device by name gives its own peak, a size that of an A100.
        batch_size, sequence_length: of a step, on all devices together.
        methods: of "full", "lora" (rank 16 on all projections) and "qlora" (the same on an NF4 base).
        dtype, optimizer: as of `plan`.
        best: how many to return, at least one of each method if any fits.

    Returns:
        `Suggestions`, a list of `Suggestion`; empty if nothing fits.

    Raises:
        ValueError: for settings that are unknown or not positive.

    Example:
        >>> print(kq.suggest(config, devices=8, device_memory="H100", batch_size=16))
        >>> kq.suggest(config, devices=1, device_memory="24GB", methods=["qlora"])[0].plan.setup.remat
    """
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise ValueError(f"devices must be a positive integer, not {devices!r}.")
    if unknown := [method for method in methods if method not in METHODS]:
        raise ValueError(f"Unknown methods {unknown}; known are {', '.join(METHODS)}.")
    first = plan(
        config,
        batch_size=batch_size,
        sequence_length=sequence_length,
        dtype=dtype,
        optimizer=optimizer,
        device_memory=device_memory,
    )
    found = []
    for mesh in _meshes(config, devices):
        shards = batch_shards(mesh)
        if batch_size % shards:
            continue
        for method, remat, micro in itertools.product(
            methods, (None, "mlp", "attention", "block"), _micro_batches(batch_size, shards)
        ):
            one = first.replaced(
                mesh=mesh,
                remat=remat,
                micro_batch_size=micro,
                sequence_parallel=mesh.get("model", 1) > 1,
                shard_optimizer=mesh.get("data", 1) > 1,
                **({"lora_rank": None, "quantization": None} | METHODS[method]),
            )
            if one.fits:
                found.append(Suggestion(method, one, predicted_seconds(one.setup, one)))
    found.sort(key=lambda suggestion: suggestion.seconds)
    leaders = [next((s for s in found if s.method == method), None) for method in methods]
    chosen = found[:best]
    chosen += [leader for leader in leaders if leader is not None and leader not in chosen]
    return Suggestions(chosen)


def predicted_seconds(setup: Setup, one: MemoryPlan) -> float:
    """See `suggest`."""
    known = accelerator(one.device or _ASSUMED)
    tokens = setup.device_rows * setup.sequence_length
    slowness = 1 + _LONELY_TOKENS / tokens
    slowness *= _UNPACKING if setup.quantization else 1
    compute = one.flops_per_step * one.recomputing / (known.peak_flops * _UTILIZATION * setup.devices)
    return compute * slowness + sum(one.communication.values()) / known.link


def _meshes(config, devices):
    for model in (1, 2, 4, 8):
        if devices % model or config.num_attention_heads % model:
            continue
        for data in range(1, devices // model + 1):
            if (devices // model) % data == 0:
                sizes = {"data": data, "fsdp": devices // model // data, "model": model}
                yield {axis: size for axis, size in sizes.items() if size > 1}


def _micro_batches(batch_size, shards):
    """None for the whole batch, and halves of it as long as each part of the mesh has a row."""
    rows = batch_size // shards
    return [None, *(rows // n * shards for n in (2, 4, 8, 16) if rows % n == 0)]
