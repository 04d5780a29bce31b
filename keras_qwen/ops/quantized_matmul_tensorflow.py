"""Dequantising on TensorFlow."""

import functools

import tensorflow as tf

from keras_qwen.ops.quantization import depending_on, first_value


def dequantize(quantized, dtype, parts, after=None):
    """The matrix in a dtype, made only when `after`, a tensor, is there."""
    parts = {name: tf.convert_to_tensor(part) for name, part in parts.items()}
    if after is None:
        return _compiled(quantized, dtype, None)(parts)
    after = first_value(after)
    return _compiled(quantized, dtype, after.dtype)(parts, after)


@functools.lru_cache
def _compiled(quantized, dtype, after_dtype):
    # XLA makes one loop of it, ten times faster than the operations one by one.
    @tf.function(jit_compile=True, autograph=False)
    def run(parts, after=None):
        parts = parts if after is None else depending_on(parts, after)
        return tf.cast(quantized.dequantize(parts), dtype)

    specs = [{name: tf.TensorSpec(part.shape, part.dtype) for name, part in quantized.parts.items()}]
    if after_dtype is not None:
        specs.append(tf.TensorSpec((), after_dtype))
    return run.get_concrete_function(*specs)
