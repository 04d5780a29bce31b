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
        if isinstance(tensor, jax.Array) and not traced and not tensor.is_fully_addressable:
            return None  # another process has the rest
    elif backend == "tensorflow":
        traced = not hasattr(tensor, "numpy")
    else:
        traced = getattr(tensor, "is_meta", False)
    return None if traced else keras.ops.convert_to_numpy(tensor)


def host_value(tensor):
    """A tensor's values as a numpy array, also where several devices hold it.

    Of a tensor on devices of several processes, which all have to call it, every device takes a copy for that time.
    Unlike `keras.ops.convert_to_numpy`, it leaves no second copy with a tensor that JAX has on several devices.
    """
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        # Of parts that lie on the replicas of a strategy, the sum.
        tensor = tf.convert_to_tensor(tensor) if isinstance(tensor, tf.distribute.DistributedValues) else tensor
    if keras.backend.backend() != "jax":
        return np.asarray(keras.ops.convert_to_numpy(tensor))
    import jax

    tensor = jax.numpy.asarray(tensor)
    if not tensor.is_fully_addressable and not tensor.is_fully_replicated:
        whole = jax.sharding.NamedSharding(tensor.sharding.mesh, jax.sharding.PartitionSpec())
        tensor = jax.device_put(tensor, whole)
    jax.block_until_ready(tensor)
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    pieces = {str(piece.index): piece for piece in tensor.addressable_shards}
    value = np.empty(tensor.shape, _numpy_dtype(dtype))
    for piece in pieces.values():
        on_cpu = piece.device.platform == "cpu"
        value[piece.index] = _memory_jax(piece.data, dtype) if on_cpu else np.asarray(jax.numpy.copy(piece.data))
    return value


def filled(shape, dtype, fill, sharding=None):
    """A tensor whose values `fill` writes, with no second copy of it in host memory.

    Args:
        shape, dtype: of the tensor.
        fill: called once with `parts`, a list of `(index, array)`: the index, a tuple of slices, says which part of the
            tensor is to be written into the array. Without a sharding, the one part is the tensor.
        sharding: JAX's, of a tensor on several devices. Then the parts are those that this process's devices hold, each
            once, however many of them hold it.

    Returns:
        A backend tensor on the default device or the sharding's, ready to become a variable's value.
    """
    backend, dtype = keras.backend.backend(), keras.backend.standardize_dtype(dtype)
    if backend == "jax":
        return _filled_jax(tuple(shape), dtype, fill, sharding)
    array = _aligned_empty(shape, dtype)
    fill([(_bounds((), shape), array)])
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


def _bounds(index, shape):
    """A tuple of slices, with their beginnings and ends."""
    index = (*index, *[slice(None)] * (len(shape) - len(index)))
    return tuple(slice(*part.indices(size)[:2]) for part, size in zip(index, shape, strict=True))


def _filled_jax(shape, dtype, fill, sharding):
    import jax

    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(_default_device_jax())
    held = {}  # (beginning, end) of each dimension: the devices of this process that hold this part
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        held.setdefault(tuple((part.start, part.stop) for part in _bounds(index, shape)), []).append(device)
    indices = [tuple(slice(*bounds) for bounds in part) for part in held]
    if next(iter(held.values()))[0].platform != "cpu":
        arrays = [np.empty([part.stop - part.start for part in index], _numpy_dtype(dtype)) for index in indices]
        fill(list(zip(indices, arrays, strict=True)))
        pieces = [
            jax.device_put(array, device)
            for array, devices in zip(arrays, held.values(), strict=True)
            for device in devices
        ]
        return jax.make_array_from_single_device_arrays(shape, sharding, pieces)
    # A CPU array made from numpy's memory could not be donated later, and `fit` would need the weights twice in its
    # first step. So the memory is JAX's own, and written before anyone else has seen it.
    tensor = jax.block_until_ready(jax.numpy.empty(shape, dtype, device=sharding))
    memory = {piece.device: _memory_jax(piece.data, dtype) for piece in tensor.addressable_shards}
    arrays = [memory[devices[0]] for devices in held.values()]
    if tensor.size:
        fill(list(zip(indices, arrays, strict=True)))
    for array, (_, *copies) in zip(arrays, held.values(), strict=True):
        for device in copies:
            np.copyto(memory[device], array)
    return tensor


def _default_device_jax():
    import jax

    device = jax.config.jax_default_device or jax.local_devices()[0]
    return jax.local_devices(backend=device)[0] if isinstance(device, str) else device


def _memory_jax(array, dtype):
    """The memory of an array on one CPU device, as a numpy array that can be written."""
    if not array.nbytes:
        return np.empty(array.shape, _numpy_dtype(dtype))
    buffer = (ctypes.c_uint8 * array.nbytes).from_address(array.unsafe_buffer_pointer())
    return np.frombuffer(buffer, "uint8").view(_numpy_dtype(dtype)).reshape(array.shape)


def _from_numpy_tensorflow(array):
    import tensorflow as tf

    if not array.size:
        return tf.convert_to_tensor(array)
    shared = array.view("uint16") if array.dtype == ml_dtypes.bfloat16 else array  # DLPack knows no bfloat16
    with tf.device("CPU"):
        tensor = tf.experimental.dlpack.from_dlpack(shared.__dlpack__())
        tensor = tf.bitcast(tensor, tf.bfloat16) if array.dtype == ml_dtypes.bfloat16 else tensor
    return tf.identity(tensor) if tf.config.list_logical_devices("GPU") else tensor
