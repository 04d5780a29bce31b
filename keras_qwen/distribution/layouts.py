"""Layouts from the parameter table: for each kind of variable one rule, which says how it lies on a mesh."""

import math
import re

import keras

from keras_qwen.config import QwenConfig
from keras_qwen.keras_private import AxesLayout
from keras_qwen.ops.quantization import KINDS
from keras_qwen.parameters import adapter_table, parameter_table, projections, quantized_table, replaceable
from keras_qwen.partitioning import checked_mesh, devices_of, mesh_sizes, partition, partition_of

_LAYER = re.compile(r"layers_\d+")


class QwenLayoutMap(keras.distribution.LayoutMap):
    """A `keras.distribution.LayoutMap` that knows which of its rules are for variables a model may not have.

    Attributes:
        config: the config it was made for.
        optional: patterns of rules for adapters and quantised weights; those need not match anything.
        notes: {pattern: why its variables are not split as their kind usually is}.
    """

    def __init__(self, device_mesh, config):
        super().__init__(device_mesh)
        self.config = config
        self.optional, self.notes = set(), {}

    def __contains__(self, pattern):
        return any(pattern == known for known in self)  # Keras's way takes every key for known

    @property
    def mesh(self) -> dict[str, int]:
        """The mesh as `{axis: size}`."""
        return mesh_sizes(self.device_mesh)

    def pattern_of(self, path):
        """The rule that a variable's path matches, or None.

        Raises:
            ValueError: if it matches several.
        """
        found = [path] if path in self else [pattern for pattern in self if re.fullmatch(pattern, path)]
        if len(found) > 1:
            raise ValueError(f"The variable {path} matches several rules of the layout map: {', '.join(found)}.")
        return found[0] if found else None


def device_mesh(mesh, devices=None) -> keras.distribution.DeviceMesh:
    """A mesh of devices, from `{axis: size}` or as it is.

    Args:
        mesh: `{"data": 2, "model": 4}`: any of the axes `data`, `fsdp` and `model`, in any order, or a `DeviceMesh`.
        devices: names of the devices, or a backend's device objects; default: the first of all there are.

    Raises:
        ValueError: for unknown axes, sizes that are no positive integers, and too few devices.

    Example:
        >>> device_mesh({"data": 2, "model": 4}).shape
        (2, 4)
    """
    if isinstance(mesh, keras.distribution.DeviceMesh):
        checked_mesh(mesh_sizes(mesh))
        return mesh
    mesh = checked_mesh(mesh)
    devices = list(keras.distribution.list_devices() if devices is None else devices)
    if len(devices) < devices_of(mesh):
        raise ValueError(
            f"The mesh {mesh} needs {devices_of(mesh)} devices, there are {len(devices)}. For a trial on a CPU, "
            f"simulate more: XLA_FLAGS=--xla_force_host_platform_device_count={devices_of(mesh)} (JAX), or "
            f"tf.config.set_logical_device_configuration (TensorFlow), before the backend starts."
        )
    return keras.distribution.DeviceMesh(tuple(mesh.values()), tuple(mesh), devices[: devices_of(mesh)])


def layout_map(config: QwenConfig, mesh) -> QwenLayoutMap:
    """The layouts of all variables of a model, of its adapters and quantised weights, as rules by path.

    `model` splits attention heads, feed-forward width and vocabulary, `fsdp` the other dimension; see
    `keras_qwen.partitioning.partition`, also for what happens where an axis does not divide.

    Args:
        config: the model's config.
        mesh: a `DeviceMesh` with axes `data`, `fsdp`, `model` (any of them, in any order), or `{axis: size}`.

    Returns:
        A `keras.distribution.LayoutMap`, to which rules may be added or whose rules may be replaced.

    Raises:
        ValueError: for a mesh that does not do; see `device_mesh`.

    Example:
        >>> layouts = kq.distribution.layout_map(config, {"fsdp": 2, "model": 4})
        >>> layouts["layers_0/self_attn/q_proj/kernel"].axes
        ('fsdp', 'model')
    """
    mesh = device_mesh(mesh)
    layouts = QwenLayoutMap(mesh, config)
    table = parameter_table(config)
    _add(layouts, table)
    everything = dict.fromkeys(projections(table), 1)
    adapted = adapter_table(table, name="NAME", ranks=everything, use_dora=True, replaced=replaceable(table))
    _add(layouts, adapted, optional=True)
    for kind in KINDS:
        _add(layouts, [row for row in quantized_table(table, kind) if row.quantized], optional=True, kind=kind)
    return layouts


def _add(layouts, rows, *, optional=False, kind=None):
    for row in rows:
        pattern = _pattern(row.path)
        if pattern in layouts:
            continue
        chosen = supported(partition(row, layouts.config, layouts.mesh))
        layouts[pattern] = AxesLayout(axes_of(chosen), layouts.device_mesh)
        if chosen.note and not optional:
            layouts.notes[pattern] = chosen.note
        if optional:
            layouts.optional.add(pattern)


def supported(partition):
    """A partition as the backend can make it: TensorFlow's DTensor splits a dimension over one axis."""
    return partition.over_single_axes() if keras.backend.backend() == "tensorflow" else partition


def axes_of(partition):
    """A partition in the form that layouts take: a name, None or, for several axes, a tuple for each dimension."""
    return tuple((axes[0] if len(axes) == 1 else axes) or None for axes in partition.dimensions)


def _pattern(path):
    path = re.escape(path).replace("lora_NAME", "lora_[^/]+")
    return r"(.*/)?" + _LAYER.sub(r"layers_\\d+", path)


def local_size(layout, shape):
    """Elements of one device's part of a tensor."""
    return math.prod(shape) // partition_of(layout).ways(mesh_sizes(layout.device_mesh))
