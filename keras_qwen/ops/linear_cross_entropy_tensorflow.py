"""What `linear_cross_entropy` needs of TensorFlow."""

import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from keras_qwen.ops.linear_cross_entropy_loop import token_sums


def adds_in_place():
    return False


def while_loop(condition, body, state):
    # One step at a time: several would each hold their logits.
    return tf.while_loop(condition, body, tuple(state), parallel_iterations=1)


def product(a, b, transpose_a=False, transpose_b=False):
    return tf.cast(tf.matmul(a, b, transpose_a=transpose_a, transpose_b=transpose_b), "float32")


def zeros(shape, dtype):
    # Never a constant of the graph, which `add` would change for all later steps.
    return tf.zeros(shape, dtype) if _in_xla() else tf.raw_ops.Empty(shape=shape, dtype=dtype, init=True)


def put(total, index, value):
    return add(total, index, value)


def add(total, index, value):
    if _in_xla():
        return tf.tensor_scatter_nd_add(total, [[index]], value[None])
    # The kernel of the scatter takes ten times as long.
    return tf.raw_ops.InplaceAdd(x=total, i=index[None], v=value[None])


def _in_xla():
    return GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


def cross_entropy(logits, labels, weights, gradients):
    best = tf.argmax(logits, axis=1, output_type=labels.dtype)
    losses, slopes = tf.raw_ops.SparseSoftmaxCrossEntropyWithLogits(features=logits, labels=labels)
    slopes = slopes * weights[:, None] if gradients else None
    return losses, best == labels, slopes


def most(plan, steps):
    return steps


def differentiable_sums(plan, hidden, kernel, labels, weights):
    # An eager loop would keep every array of every step alive and update nothing in place.
    sums = _compiled_token_sums if tf.executing_eagerly() else token_sums
    kernel = tf.convert_to_tensor(kernel)
    if not plan.gradients:
        return sums(plan, hidden, kernel, labels, weights)[:2]

    @tf.custom_gradient
    def run(hidden, kernel):
        loss_sum, correct_sum, hidden_gradient, kernel_gradient = sums(plan, hidden, kernel, labels, weights)

        def backward(scale, _):
            if not plan.kernel_gradient:
                return hidden_gradient * tf.cast(scale, hidden.dtype), None
            scaled = tf.reshape(kernel_gradient * scale, kernel.shape)
            return hidden_gradient * tf.cast(scale, hidden.dtype), tf.cast(scaled, kernel.dtype)

        return (loss_sum, correct_sum), backward

    return run(hidden, kernel if plan.kernel_gradient else tf.stop_gradient(kernel))


_compiled_token_sums = tf.function(token_sums, autograph=False)
