"""The device on TensorFlow."""

import functools
import subprocess

import tensorflow as tf

from keras_qwen.devices import Memory

OPERATION_ERROR = tf.errors.OpError


def device_name():
    devices = tf.config.list_physical_devices("GPU")
    return tf.config.experimental.get_device_details(devices[0]).get("device_name", "GPU") if devices else None


def device_memory():
    stats = tf.config.experimental.get_memory_info("GPU:0")
    return Memory(stats["current"], stats["peak"], _limit())


@functools.cache
def _limit():
    """TensorFlow does not say it; NVIDIA's tool does, where it is installed."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]) * 2**20
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError):
        return None
