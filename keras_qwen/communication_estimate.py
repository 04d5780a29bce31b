"""What a training step sends between devices, counted on paper from config and mesh.

The count, in bytes that each device receives, for ring algorithms: gathering N bytes from k devices, or reducing and
scattering them, takes N (k - 1) / k; an all-reduce is both. With T tokens on a device, h the hidden size, c bytes of
the compute dtype, W bytes of a block's weights in it after the split over `model`:

- `model`: each block's forward pass reduces the outputs of `o_proj` and `down_proj`, T h c each; its backward pass
  reduces the gradients of both parts' inputs; recomputing a part that is not the block's last reduces once more
  (`down_proj`'s output is not needed again). With sequence parallelism each of these is a reduce-scatter and a gather
  in another place, and the inputs of both parts are gathered once more for the gradients of the weights, where remat
  recomputes them. The head's gradient of the hidden states, and the embedding's lookup, are reduced once each.
- `fsdp`: each block's weights are gathered for the forward and for the backward pass, W each, their gradients reduced
  and scattered, W; the head's and the embedding's once, and their gradients in float32, as that is how they are summed.
- `data`: the gradients are reduced over it, in the weights' dtype; with `shard_optimizer` scattered, and the new
  weights gathered.

References: Shoeybi et al., 2019, arXiv:1909.08053, section 3; Korthikanti et al., 2022, arXiv:2205.05198, section 4.2.
"""

import math

from keras_qwen.memory_estimate import DTYPE_BYTES, Setup, counted
from keras_qwen.parameters import adapter_table, parameter_table, projections
from keras_qwen.partitioning import partition


def communication(setup: Setup) -> dict[str, float]:
    """Bytes that each device receives in a step, by mesh axis.

    Args:
        setup: what is trained, and how; see `keras_qwen.memory_estimate.Setup`.

    Returns:
        `{axis: bytes}` for the mesh's axes.

    Example:
        >>> communication(Setup(config, {"fsdp": 2, "model": 8}, batch_size=8, sequence_length=4096))["model"] / 1e9
    """
    config, mesh = setup.config, setup.mesh
    share = {axis: (size - 1) / size for axis, size in mesh.items()}
    wide, narrow = DTYPE_BYTES[setup.dtype]
    steps = setup.batch_size // (setup.micro_batch_size or setup.batch_size)
    tokens = setup.device_rows * setup.sequence_length
    hidden = tokens * config.hidden_size * narrow
    found = dict.fromkeys(mesh, 0.0)
    if "model" in mesh:
        found["model"] = steps * share["model"] * hidden * (_of_blocks(setup) + 2 * 2)
    table, full = parameter_table(config), setup.lora_rank is None
    adapter = () if full else adapter_table(
        table, name="default", ranks=dict.fromkeys(projections(table), setup.lora_rank)
    )  # fmt: skip
    rows = [(row, count, full) for row, count in counted(table)]
    rows += [(row, count, True) for row, count in counted(adapter)]
    for row, count, trained in rows:
        split = partition(row, config, mesh)
        local = count * math.prod(split.local_shape(row.shape, mesh))
        over_fsdp = any("fsdp" in axes for axes in split.dimensions)
        vocab = "vocab" in row.axes
        if over_fsdp:
            whole = local * mesh["fsdp"] * share["fsdp"]
            found["fsdp"] += steps * whole * narrow * (1 if vocab else 2)
            if trained:
                found["fsdp"] += steps * whole * (wide if vocab else narrow)
        elif "fsdp" in mesh and trained:
            found["fsdp"] += 2 * steps * local * wide * share["fsdp"]
        if "data" in mesh and trained:
            found["data"] += 2 * local * wide * share["data"]
    return found


def _of_blocks(setup):
    """How often the hidden states of a device's tokens are gathered or reduced and scattered in all blocks."""
    layers = setup.config.num_hidden_layers
    again = {None: 0, "block": 1, "attention": 0, "mlp": 0}.get(
        setup.remat, 1 / setup.remat if isinstance(setup.remat, int) else 0
    )
    gathers, scatters = 2 + 2, 2 + 2  # forward; backward
    scatters += again
    if setup.sequence_parallel:
        gathers += {None: 0, "attention": 1, "mlp": 1}.get(setup.remat, 2 * again)
    else:
        gathers += again
    return layers * (gathers + scatters)
