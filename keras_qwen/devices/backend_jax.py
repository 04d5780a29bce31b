"""The device on JAX."""

import jax

from keras_qwen.devices import Memory

OPERATION_ERROR = jax.errors.JaxRuntimeError


def device_name():
    device = jax.local_devices()[0]
    return None if device.platform == "cpu" else device.device_kind


def device_memory():
    stats = jax.local_devices()[0].memory_stats() or {}
    return Memory(stats.get("bytes_in_use", 0), stats.get("peak_bytes_in_use"), stats.get("bytes_limit"))
