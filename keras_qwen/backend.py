"""Small questions about the backend that Keras runs on; no backend but that one is imported."""

import ctypes

import keras
import ml_dtypes
import numpy as np


def concrete_value(tensor):
    """The tensor's values as a numpy array, or None where they are not known (while tracing, say)."""
    if isinstance(tensor, np.ndarray):
        return tensor
    if isinstance(tensor, keras.KerasTensor):
        return None
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        traced = isinstance(tensor, jax.core.Tracer)
    elif backend == "tensorflow":
        traced = not hasattr(tensor, "numpy")
    else:
        traced = getattr(tensor, "is_meta", False)
    return None if traced else keras.ops.convert_to_numpy(tensor)


def value_of(variable):
    """The value of a Keras variable as a numpy array; of one whose parts lie on TensorFlow's replicas, their sum."""
    value = variable.value
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        value = tf.convert_to_tensor(value) if isinstance(value, tf.distribute.DistributedValues) else value
    return keras.ops.convert_to_numpy(value)


def filled(shape, dtype, fill):
    """A tensor whose values `fill` writes, with no second copy of it in host memory.

    Args:
        shape, dtype: of the tensor.
        fill: called with a writable numpy array of that shape and dtype.

    Returns:
        A backend tensor on the default device, ready to become a variable's value.
    """
    backend, dtype = keras.backend.backend(), keras.backend.standardize_dtype(dtype)
    if backend == "jax":
        return _filled_jax(shape, dtype, fill)
    array = _aligned_empty(shape, dtype)
    fill(array)
    if backend == "tensorflow":
        return _from_numpy_tensorflow(array)
    return keras.ops.convert_to_tensor(array, dtype=dtype)


def _aligned_empty(shape, dtype, alignment=64):
    """An uninitialised array at an address that the backends can take over as it is."""
    nbytes = int(np.prod(shape, dtype="int64")) * _numpy_dtype(dtype).itemsize
    raw = np.empty(nbytes + alignment, "uint8")
    start = -raw.ctypes.data % alignment
    return raw[start : start + nbytes].view(_numpy_dtype(dtype)).reshape(shape)


def _numpy_dtype(dtype):
    return np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)


def _filled_jax(shape, dtype, fill):
    import jax

    device = jax.config.jax_default_device or jax.local_devices()[0]
    if getattr(device, "platform", device) != "cpu":
        array = np.empty(shape, _numpy_dtype(dtype))
        fill(array)
        return jax.device_put(array, device)
    # A CPU array made from numpy's memory could not be donated later, and `fit` would need the weights twice in its
    # first step. So the memory is JAX's own, and written before anyone else has seen it.
    tensor = jax.block_until_ready(jax.numpy.empty(shape, dtype))
    nbytes = tensor.nbytes
    if nbytes:
        buffer = (ctypes.c_uint8 * nbytes).from_address(tensor.unsafe_buffer_pointer())
        fill(np.frombuffer(buffer, "uint8").view(_numpy_dtype(dtype)).reshape(shape))
    return tensor


def _from_numpy_tensorflow(array):
    import tensorflow as tf

    if not array.size:
        return tf.convert_to_tensor(array)
    shared = array.view("uint16") if array.dtype == ml_dtypes.bfloat16 else array  # DLPack knows no bfloat16
    with tf.device("CPU"):
        tensor = tf.experimental.dlpack.from_dlpack(shared.__dlpack__())
        tensor = tf.bitcast(tensor, tf.bfloat16) if array.dtype == ml_dtypes.bfloat16 else tensor
    return tf.identity(tensor) if tf.config.list_logical_devices("GPU") else tensor
