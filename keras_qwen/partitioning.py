"""How a model lies on a mesh: which mesh axis each dimension of a parameter, or of an activation, is split over.

Pure arithmetic on the parameter table. The layouts, the training step's placements and the planner all read it.
"""

import dataclasses
import math
import numbers

from keras_qwen.config import QwenConfig
from keras_qwen.parameters import Parameter

MESH_AXES = ("data", "fsdp", "model")
"""`data` splits the batch, `fsdp` the batch and the weights, `model` heads, feed-forward and vocabulary."""
BATCH_AXES = ("data", "fsdp")

_OVER_MODEL = ("vocab", "heads", "kv_heads", "mlp")
_NEVER = ("rank", "head_dim")


def checked_mesh(mesh) -> dict[str, int]:
    """A mesh as `{axis: size}`, checked.

    Args:
        mesh: a dict of axes and sizes, in the order of the devices; the last axis's neighbours are next to each other.

    Raises:
        ValueError: for axes other than `MESH_AXES` and sizes that are no positive integers.

    Example:
        >>> checked_mesh({"data": 2, "model": 4})
        {'data': 2, 'model': 4}
    """
    if not isinstance(mesh, dict) or not mesh:
        raise ValueError(f"A mesh is a dict such as {{'data': 2, 'model': 4}}, not {mesh!r}.")
    if unknown := [axis for axis in mesh if axis not in MESH_AXES]:
        raise ValueError(f"Unknown mesh axes {unknown}; known are {', '.join(MESH_AXES)}.")
    for axis, size in mesh.items():
        if isinstance(size, bool) or not isinstance(size, numbers.Integral) or size < 1:
            raise ValueError(f"The mesh axis {axis!r} must have a positive number of devices, not {size!r}.")
    return {axis: int(size) for axis, size in mesh.items()}


def mesh_sizes(device_mesh) -> dict[str, int]:
    """A `DeviceMesh` as `{axis: size}`."""
    return dict(zip(device_mesh.axis_names, map(int, device_mesh.shape), strict=True))


def devices_of(mesh) -> int:
    """The number of devices of a mesh."""
    return math.prod(mesh.values())


def batch_shards(mesh) -> int:
    """Into how many parts a batch is split."""
    return math.prod(mesh.get(axis, 1) for axis in BATCH_AXES)


@dataclasses.dataclass(frozen=True)
class Partition:
    """How a tensor is split.

    Attributes:
        dimensions: for each dimension, the mesh axes that it is split over, major first; `()` for none.
        note: why it is not split as its kind usually is, or "".
    """

    dimensions: tuple[tuple[str, ...], ...]
    note: str = ""

    def ways(self, mesh) -> int:
        """The number of different pieces; the rest of the mesh holds copies."""
        return math.prod(mesh.get(axis, 1) for axes in self.dimensions for axis in axes)

    def local_shape(self, shape, mesh) -> tuple[int, ...]:
        """The shape of one device's piece."""
        return tuple(
            size // math.prod(mesh.get(axis, 1) for axis in axes)
            for size, axes in zip(shape, self.dimensions, strict=True)
        )

    def divides(self, shape, mesh) -> bool:
        """Whether the pieces of a tensor of a shape are all alike."""
        return all(
            size % math.prod(mesh.get(axis, 1) for axis in axes) == 0
            for size, axes in zip(shape, self.dimensions, strict=True)
        )

    def over_single_axes(self) -> "Partition":
        """The same, with no dimension split over more than its major axis."""
        left_out = [axis for axes in self.dimensions for axis in axes[1:]]
        if not left_out:
            return self
        note = f"a second axis of one dimension, {' and '.join(left_out)}, does not split it"
        return Partition(tuple(axes[:1] for axes in self.dimensions), "; ".join(filter(None, (self.note, note))))

    def spread(self, shape, mesh, axis) -> "Partition":
        """The same, with one dimension split over a further axis, if there is one that divides and has room for it."""
        if mesh.get(axis, 1) == 1 or any(axis in axes for axes in self.dimensions):
            return self
        local = self.local_shape(shape, mesh)
        free = sorted(range(len(shape)), key=lambda d: len(self.dimensions[d]))
        place = next((d for d in free if local[d] % mesh[axis] == 0), None)
        if place is None:
            return self
        dimensions = tuple((*axes, axis) if d == place else axes for d, axes in enumerate(self.dimensions))
        return Partition(dimensions, self.note)


def partition_of(layout) -> Partition:
    """A Keras layout as a partition."""
    return Partition(tuple(axes if isinstance(axes, tuple) else (axes,) if axes else () for axes in layout.axes))


def partition(row: Parameter, config: QwenConfig, mesh) -> Partition:
    """How a parameter is split over a mesh.

    `model` splits heads, feed-forward width and vocabulary, so that no product's sum runs over devices but in `o_proj`
    and `down_proj`, as in Megatron-LM; `fsdp` splits the other dimension, which only saves memory: it is gathered for
    use. Whole heads go to a device. What an axis does not divide goes over the parameter's other dimension, if it
    divides that; key/value heads that `model` does not divide are whole on each device. Vectors that are not split by
    `model` (norms) are whole.

    Args:
        row: of the parameter table, an adapter's included.
        config: the model's config.
        mesh: as of `checked_mesh`.

    References: Shoeybi et al., 2019, "Megatron-LM", arXiv:1909.08053; Zhao et al., 2023, "PyTorch FSDP",
        arXiv:2304.11277.

    Example:
        >>> row = parameter_table(config)[2]
        >>> row.path, partition(row, config, {"fsdp": 2, "model": 4}).dimensions
        ('layers_0/self_attn/q_proj/kernel', (('fsdp',), ('model',)))
    """
    chosen, notes = [()] * len(row.shape), []

    def local(d):
        return row.shape[d] // math.prod(mesh[axis] for axis in chosen[d])

    model, fsdp = mesh.get("model", 1), mesh.get("fsdp", 1)
    if model > 1:
        natural = [d for d, axis in enumerate(row.axes) if axis in _OVER_MODEL]
        other = [d for d, axis in enumerate(row.axes) if axis not in (*_OVER_MODEL, *_NEVER) and len(row.axes) > 1]
        place = next((d for d in natural if _divides(row, d, config, model)), None)
        if place is None and natural and row.axes[natural[0]] == "kv_heads":
            notes.append(f"{config.num_key_value_heads} key/value heads are not divided by model={model}: whole")
        elif place is None and natural:
            place = next((d for d in other if row.shape[d] % model == 0), None)
            count = config.num_attention_heads if row.axes[natural[0]] == "heads" else row.shape[natural[0]]
            instead = "whole" if place is None else f"{row.axes[place]} is split instead"
            notes.append(f"{row.axes[natural[0]]} {count} is not divided by model={model}: {instead}")
        if place is not None:
            chosen[place] = ("model",)
    if fsdp > 1 and len(row.shape) > 1:
        order = sorted(range(len(row.shape)), key=lambda d: (len(chosen[d]), row.axes[d] in _OVER_MODEL))
        order = [d for d in order if row.axes[d] not in _NEVER]
        place = next((d for d in order if local(d) % fsdp == 0), None)
        if place is None:
            notes.append(f"no dimension of {row.shape} is divided by fsdp={fsdp}: whole over it")
        else:
            if place != order[0]:
                notes.append(f"{row.axes[order[0]]} is not divided by fsdp={fsdp}: {row.axes[place]} is split instead")
            chosen[place] = (*chosen[place], "fsdp")
    return Partition(tuple(chosen), "; ".join(notes))


def _divides(row, dimension, config, ways):
    """Whether a dimension falls into so many pieces of whole heads."""
    heads = {"heads": config.num_attention_heads, "kv_heads": config.num_key_value_heads}.get(row.axes[dimension], ways)
    return heads % ways == 0 and row.shape[dimension] % ways == 0


def update_partition(whole: Partition, shape, mesh, *, shard_optimizer) -> Partition:
    """How a weight's moments and its update are split: as the weight, with `shard_optimizer` over `data`, too.

    That is ZeRO's first stage: gradients are reduced to the piece that a device updates, the new weights are gathered.

    Reference: Rajbhandari et al., 2020, "ZeRO", arXiv:1910.02054.
    """
    return whole.spread(shape, mesh, "data") if shard_optimizer and len(shape) > 1 else whole


def activation_partition(axes, shape, mesh, *, sequence_parallel=False) -> Partition:
    """How an activation is split.

    Args:
        axes: what its dimensions count: "batch", "length", "embed", "heads", "kv_heads", "mlp", "vocab"; and
            "residual" for the length of the residual stream between the blocks, which `sequence_parallel` splits.
        shape: its shape; unknown sizes (None) and sizes that do not divide are not split.
        mesh: as of `checked_mesh`.
        sequence_parallel: whether the residual stream is split over `model`.

    Reference: Korthikanti et al., 2022, "Reducing Activation Recomputation in Large Transformer Models",
        arXiv:2205.05198.
    """
    over = {"batch": tuple(axis for axis in BATCH_AXES if mesh.get(axis, 1) > 1)}
    if mesh.get("model", 1) > 1:
        over |= dict.fromkeys(_OVER_MODEL, ("model",))
        if sequence_parallel:
            over["residual"] = ("model",)

    def fits(size, mesh_axes):
        return size is not None and size % math.prod(mesh[axis] for axis in mesh_axes) == 0

    return Partition(
        tuple(
            over[axis] if axis in over and fits(size, over[axis]) else ()
            for axis, size in zip(axes, shape, strict=True)
        )
    )
