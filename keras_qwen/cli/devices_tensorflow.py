"""The devices that TensorFlow computes on; see `keras_qwen.cli.doctor`."""

import tensorflow as tf


def devices():
    found = []
    for device in tf.config.list_physical_devices():
        details = tf.config.experimental.get_device_details(device) if device.device_type == "GPU" else {}
        name = device.name.removeprefix("/physical_device:").lower()
        # TensorFlow tells a card's memory only by taking it.
        found.append((name, details.get("device_name", device.device_type.lower()), None))
    return found
