"""The steps on TensorFlow."""

import contextlib
import functools

import keras
import tensorflow as tf

from keras_qwen.ops.linear_cross_entropy import TokenLoss
from keras_qwen.ops.placement import constrained, on_dtensor, placed, update_layouts
from keras_qwen.training.adam_tensorflow import in_place
from keras_qwen.training.replicas_tensorflow import shared, summed, summed_once
from keras_qwen.training.step import add, zero_sums


def train_step(step, model, data):
    unscaled = step.batch(model, data)
    weight_sum = summed(tf.reduce_sum(unscaled[2]))
    batch = step.scaled(model.optimizer, unscaled, weight_sum)
    variables = model.trainable_weights

    def gradients_and_sums(batch):
        # Of what is frozen, the tape has to know nothing.
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([variable.value for variable in variables])
            sums = step.token_loss(*batch, training=True)
        return tape.gradient(sums.loss_sum, variables), sums

    micro = step.micro_batches(batch, training=True)
    if micro is None:
        gradients, sums = gradients_and_sums(batch)
    else:

        def accumulate(i, totals, sums):
            gradients, more = gradients_and_sums(_part(micro, i))
            totals = [t + tf.cast(g, tf.float32) for t, g in zip(totals, gradients, strict=True)]
            return i + 1, totals, tuple(add(TokenLoss(*sums), more))

        zeros = [tf.zeros(v.shape, tf.float32) for v in variables]
        _, gradients, sums = _loop(micro, accumulate, zeros, tuple(zero_sums()))
        gradients = [tf.cast(g, v.dtype) for g, v in zip(gradients, variables, strict=True)]
        sums = TokenLoss(*sums)
    layouts = update_layouts(variables)
    gradients = summed(constrained(gradients, layouts))
    sums = shared(step.unscaled(model.optimizer, TokenLoss(*summed(tuple(sums))), weight_sum))
    logs = step.report(model, sums, gradients, unscaled)
    # XLA makes one loop of an update by itself.
    update = contextlib.nullcontext() if model.jit_compile or layouts else in_place(model.optimizer, variables)
    with update, summed_once(model.optimizer):
        model.optimizer.apply_gradients(zip(gradients, variables, strict=True))
    return logs


def test_step(step, model, data):
    batch = step.batch(model, data)
    micro = step.micro_batches(batch, training=False)
    if micro is None:
        return _tested(step, model, step.token_loss(*batch, training=False))

    def accumulate(i, sums):
        return i + 1, tuple(add(TokenLoss(*sums), step.token_loss(*_part(micro, i), training=False)))

    _, sums = _loop(micro, accumulate, tuple(zero_sums()))
    return _tested(step, model, sums)


def _tested(step, model, sums):
    return step.report(model, shared(TokenLoss(*summed(tuple(sums)))))


def _part(micro, i):
    return tf.nest.map_structure(lambda x: placed(x[i], "batch", *["length"] * (len(x.shape) - 2)), micro)


def _loop(micro, body, *state):
    """Runs `body(i, *state)` for each micro-batch, one after the other."""
    count = tf.shape(micro[1])[0]
    return tf.while_loop(lambda i, *_: i < count, body, (tf.constant(0), *state), parallel_iterations=1)


def sum_of_squares(x):
    """Float32, without an array of the squares."""
    return 2.0 * tf.nn.l2_loss(tf.cast(x, tf.float32))


def compiled(function, *arguments):
    """`function(*arguments)` as one operation; on a mesh, which XLA does not compile for, as it is."""
    if on_dtensor():
        return function(*(x.value if isinstance(x, keras.Variable) else x for x in arguments))
    return _compiled(function)(*arguments)


@functools.lru_cache(maxsize=8)
def _compiled(function):
    return tf.function(function, jit_compile=True, autograph=False)
