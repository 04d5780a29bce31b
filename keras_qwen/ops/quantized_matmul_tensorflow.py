"""Dequantising on TensorFlow."""

import functools

import tensorflow as tf

from keras_qwen.ops.placement import on_dtensor
from keras_qwen.ops.quantization import depending_on, first_value


def dequantize(quantized, dtype, parts, after=None):
    """The matrix in a dtype, made only when `after`, a tensor, is there."""
    after = tf.zeros(()) if after is None else first_value(after)
    parts = {name: tf.convert_to_tensor(part) for name, part in parts.items()}
    if on_dtensor():  # for which XLA does not compile
        return tf.cast(quantized.dequantize(depending_on(parts, after)), dtype)
    return _compiled(quantized, dtype, after.dtype)(parts, after)


@functools.lru_cache
def _compiled(quantized, dtype, after_dtype):
    # XLA makes one loop of it, ten times faster than the operations one by one.
    @tf.function(jit_compile=True, autograph=False)
    def run(parts, after):
        return tf.cast(quantized.dequantize(depending_on(parts, after)), dtype)

    # Taken out here, as calls with many shapes would have TensorFlow warn of retracing.
    specs = {name: tf.TensorSpec(part.shape, part.dtype) for name, part in quantized.parts.items()}
    return run.get_concrete_function(specs, tf.TensorSpec((), after_dtype))
