"""What `linear_cross_entropy` needs of TensorFlow."""

import functools

import tensorflow as tf
from keras import ops
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from keras_qwen.ops import linear_cross_entropy_mesh_tensorflow
from keras_qwen.ops.placement import on_dtensor


def adds_in_place():
    return False


def while_loop(condition, body, state):
    # One step at a time: several would each hold their logits.
    return tf.while_loop(condition, body, tuple(state), parallel_iterations=1)


def product(a, b, transpose_a=False, transpose_b=False):
    return tf.cast(tf.matmul(a, b, transpose_a=transpose_a, transpose_b=transpose_b), "float32")


def zeros(shape, dtype):
    # Never a constant of the graph, which `add` would change for all later steps.
    return tf.zeros(shape, dtype) if in_xla() else tf.raw_ops.Empty(shape=shape, dtype=dtype, init=True)


def put(total, index, value):
    if total.shape[0] == 1:
        return value[None]
    if in_xla():
        return ops.slice_update(total, (index, 0, 0), value[None])
    return tf.raw_ops.InplaceUpdate(x=total, i=index[None], v=value[None])


def add(total, index, value, axis):
    pieces = total.shape[axis]
    if pieces == 1:
        return total + tf.expand_dims(value, axis)
    if in_xla():
        start = (index, 0, 0) if axis == 0 else (0, index, 0)
        value = tf.expand_dims(value, axis)
        return ops.slice_update(total, start, value + tf.slice(total, start, value.shape))
    if axis == 0:
        return tf.raw_ops.InplaceAdd(x=total, i=index[None], v=value[None])
    rows = tf.reshape(total, (-1, total.shape[2]))
    rows = tf.raw_ops.InplaceAdd(x=rows, i=tf.range(total.shape[0]) * pieces + index, v=value)
    return tf.reshape(rows, total.shape)


def top(logits, labels):
    best = tf.argmax(logits, axis=1, output_type=labels.dtype)
    picked = tf.gather(logits, tf.stack([best, labels], axis=1), batch_dims=1)
    return picked[:, :1], picked[:, 1:], best == labels


def subtract_at(x, columns, values):
    return x - tf.where(tf.range(x.shape[1]) == columns[:, None], values, 0.0)


def materialize(x):
    return x


def in_xla():
    """Whether what is traced now is going to be compiled by XLA."""
    return GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


def most(plan, steps):
    return steps


def differentiable_sums(sums, plan, hidden, kernel, labels, weights):
    if on_dtensor():
        return linear_cross_entropy_mesh_tensorflow.differentiable_sums(plan, hidden, kernel, labels, weights)
    # An eager loop would keep every array of every step alive and update nothing in place.
    if tf.executing_eagerly():
        sums = _compiled(sums)
    if not plan.gradients:
        return sums(plan, hidden, kernel, labels, weights)[:2]

    constants = [tf.stop_gradient(x) for x in (hidden, kernel, labels, weights)]

    @tf.custom_gradient
    def run(*trained):
        loss_sum, correct_sum, hidden_gradient, kernel_gradient = sums(plan, *constants)

        def backward(scale, _):
            gradients = [hidden_gradient * tf.cast(scale, hidden.dtype)]
            if plan.kernel_gradient:
                scaled = _scale(kernel_gradient, scale, axis=0 if plan.transposed else 1)
                gradients.append(tf.cast(tf.reshape(scaled, kernel.shape), kernel.dtype))
            return gradients

        return (loss_sum, correct_sum), backward

    return run(hidden, kernel) if plan.kernel_gradient else run(hidden)


def _scale(total, scale, axis):
    """`total * scale` in the memory of total, which a product takes over by itself outside of XLA."""
    if tf.get_static_value(scale) == 1.0:
        return total
    pieces = total.shape[axis]
    if pieces == 1 or not in_xla():
        return total * scale
    shape = [1 if i == axis else size for i, size in enumerate(total.shape)]

    def step(index, total):
        start = [index if i == axis else 0 for i in range(3)]
        return index + 1, ops.slice_update(total, start, tf.slice(total, start, shape) * scale)

    steps = tf.where(tf.equal(scale, 1.0), 0, pieces)
    return while_loop(lambda index, _: index < steps, step, (tf.constant(0), total))[1]


@functools.cache
def _compiled(sums):
    return tf.function(sums, autograph=False)
