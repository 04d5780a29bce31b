"""The devices that JAX computes on; see `keras_qwen.cli.doctor`."""

import jax


def devices():
    found = []
    for device in jax.devices():
        memory = (device.memory_stats() or {}) if device.platform != "cpu" else {}
        found.append((f"{device.platform}:{device.id}", device.device_kind, memory.get("bytes_limit")))
    return found
