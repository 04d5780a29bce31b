"""What attention needs of TensorFlow; `attention_backend` says what each function does."""

import functools

import tensorflow as tf
from keras import ops

from keras_qwen.ops.recompute_tensorflow import after


def device():
    return "gpu" if tf.config.list_physical_devices("GPU") else "cpu"


def matmul_float32(left, right, transpose_left=False, transpose_right=False):
    return tf.cast(tf.matmul(left, right, transpose_a=transpose_left, transpose_b=transpose_right), tf.float32)


def softmax(scores):
    return tf.nn.softmax(scores)


def call_with_gradient(forward, backward, settings, inputs, constants):
    forward, backward = _traced_once(forward), _traced_once(backward)

    @tf.custom_gradient
    def call(*inputs):
        output, saved = forward(settings, inputs, constants)
        return output, lambda gradient: backward(settings, after(gradient, *inputs), constants, saved, gradient)

    return call(*inputs)


@functools.lru_cache
def _traced_once(function):
    # The layers of a model call with the same shapes: one graph serves them all.
    return tf.function(function, autograph=False)


def slice_block(tensor, index, size):
    batch, _, *rest = ops.shape(tensor)
    return tf.slice(tensor, (0, index * size, *(0 for _ in rest)), (batch, size, *rest))


def zero_blocks(count, shape, dtype="float32"):
    # Outside XLA, TensorFlow copies a whole tensor to change a part of it; an array's entries it replaces one by one.
    zeros = tf.zeros((count, *shape), dtype)
    blocks = tf.TensorArray(zeros.dtype, count, element_shape=zeros.shape[1:], clear_after_read=False)
    return blocks.unstack(zeros)


def read_block(blocks, index):
    return blocks.read(index)


def write_block(blocks, index, values):
    return blocks.write(index, values)


def stack_blocks(blocks):
    return blocks.stack()
