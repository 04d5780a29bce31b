"""What `recompute` needs of TensorFlow."""

import tensorflow as tf


def after(slopes, *tensors):
    with tf.control_dependencies([slopes]):
        return tuple(tf.identity(tensor) for tensor in tensors)


def no_gradients(*tensors):
    return (None,) * len(tensors)
