"""Tensors and variables on a mesh of TensorFlow's DTensor: from the host onto the mesh, and back."""

import functools

import keras
import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from keras_qwen import keras_private, keras_private_tensorflow


@functools.cache
def mesh_of(device_mesh):
    """DTensor's mesh of a Keras `DeviceMesh`."""
    devices = [str(name).upper() for name in device_mesh.devices.flatten()]
    return dtensor.create_mesh(list(zip(device_mesh.axis_names, device_mesh.shape, strict=True)), devices=devices)


def layout_of(layout):
    """DTensor's form of a Keras `TensorLayout`."""
    return dtensor.Layout([axis or dtensor.UNSHARDED for axis in layout.axes], mesh_of(layout.device_mesh))


def spread(tensor, layout):
    """A tensor split as DTensor's layout says; each device gets its piece of what lies on the host alone."""
    if not tf.executing_eagerly() or dtensor.is_dtensor(tensor):
        return dtensor.relayout(tensor, layout)
    pieces = [tensor[_slices(layout, tensor.shape, place)] for place in layout.mesh.local_device_locations()]
    return dtensor.pack([tf.convert_to_tensor(piece) for piece in pieces], layout)


def gathered(tensor):
    """A DTensor as a numpy array in host memory."""
    layout = dtensor.fetch_layout(tensor)
    whole, pieces = np.empty(tensor.shape, tensor.dtype.as_numpy_dtype), dtensor.unpack(tensor)
    for place, piece in zip(layout.mesh.local_device_locations(), pieces, strict=True):
        whole[_slices(layout, whole.shape, place)] = piece.numpy()
    return whole


def _slices(layout, shape, place):
    """Which part of a tensor a device at a place of the mesh, {axis: index}, holds."""
    slices = []
    for size, axis in zip(shape, layout.sharding_specs, strict=True):
        count = 1 if axis == dtensor.UNSHARDED else layout.mesh.dim_size(axis)
        index, part = 0 if count == 1 else place[axis], size // count
        slices.append(slice(index * part, (index + 1) * part))
    return tuple(slices)


class MeshVariable(dtensor.DVariable):
    """A `DVariable` that takes values from the host, and gives its own as a numpy array."""

    def assign(self, value, *args, **kwargs):
        return super().assign(spread(value, self.layout), *args, **kwargs)

    def numpy(self):
        return gathered(self.read_value())

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.numpy(), dtype)


def use_mesh_variables():
    """From now on, Keras variables made under a distribution of this package lie on its mesh."""
    keras_private_tensorflow.initialize_variables(_mesh_variable)


def _mesh_variable(variable, value):
    distribution = keras.distribution.distribution()
    if not hasattr(distribution, "place"):
        return None
    value = tf.convert_to_tensor(value() if callable(value) else value, variable._dtype)
    layout = keras_private.layout_of(variable) or distribution.variable_layout(variable.path, len(value.shape))
    keras_private_tensorflow.set_layout(variable, layout)
    return MeshVariable(spread(value, layout_of(layout)), trainable=variable.trainable, name=variable.name)
