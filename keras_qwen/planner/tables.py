"""Plans as text."""

from keras_qwen.memory_estimate import CATEGORIES


def gigabytes(number):
    """`12.34 GB`, of 10^9 bytes."""
    return f"{number / 1e9:,.2f} GB"


def title(setup):
    """What is trained, and how, in a line."""
    mesh = " x ".join(f"{axis} {size}" for axis, size in setup.mesh.items()) or "one device"
    method = "full" if setup.lora_rank is None else f"LoRA {setup.lora_rank}"
    parts = [method, setup.quantization, setup.dtype, setup.optimizer, f"remat {setup.remat}"]
    parts += [f"micro-batch {setup.micro_batch_size}"] if setup.micro_batch_size else []
    parts += ["sequence parallel"] if setup.sequence_parallel else []
    parts += ["sharded optimizer"] if setup.shard_optimizer else []
    rows = f"{setup.batch_size} x {setup.sequence_length} tokens"
    return f"{rows} on {mesh}: {', '.join(part for part in parts if part)}"


def plan_table(plan):
    """See `MemoryPlan`."""
    lines = [title(plan.setup)]
    for category in CATEGORIES:
        lines.append(f"  {category.replace('_', ' '):20} {gigabytes(plan.categories[category]):>12}")
    lines.append(f"  {'each device':20} {gigabytes(plan.total_bytes):>12}")
    if plan.device_memory is not None:
        verdict = "fits into" if plan.fits else "does not fit into"
        lines.append(
            f"  {verdict} {gigabytes(plan.usable_bytes)}, the usable part of {gigabytes(plan.device_memory)}"
            + (f" ({plan.device})" if plan.device else "")
        )
    lines.append(f"  {plan.flops_per_step / 1e12:,.1f} TFLOP a step on all devices")
    for axis, size in plan.communication.items():
        if size:
            lines.append(f"  {gigabytes(size)} over {axis!r} a step and device")
    if plan.floor_seconds is not None:
        lines.append(f"  at least {plan.floor_seconds:.2f} s a step on {plan.setup.devices} x {plan.device}")
    return "\n".join(lines)


def suggestions_table(suggestions):
    """See `suggest`."""
    if not suggestions:
        return "Nothing fits: more devices, a shorter sequence_length, or another method."
    lines = [f"{'method':7} {'mesh':30} {'remat':10} {'micro-batch':>11} {'GB / device':>12} {'s / step':>9}"]
    for one in suggestions:
        setup = one.plan.setup
        mesh = " x ".join(f"{axis} {size}" for axis, size in setup.mesh.items()) or "one device"
        lines.append(
            f"{one.method:7} {mesh:30} {setup.remat!s:10} {setup.micro_batch_size or setup.batch_size:11} "
            f"{one.plan.total_bytes / 1e9:12.2f} {one.seconds:9.2f}"
        )
    return "\n".join(lines)
