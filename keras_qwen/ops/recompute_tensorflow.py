"""What `recompute` needs of TensorFlow."""

import tensorflow as tf
from keras import ops

lean = ops.custom_gradient


def after(slopes, *tensors):
    with tf.control_dependencies([slopes]):
        return tuple(tf.identity(tensor) for tensor in tensors)


def together(*tensors):
    return tensors


def no_gradients(*tensors):
    return (None,) * len(tensors)


def add_product(y, left, right):
    return y + tf.matmul(left, right)
