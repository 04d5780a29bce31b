"""Adam on TensorFlow, in the memory of weights and moments."""

import contextlib

import keras
import tensorflow as tf

from keras_qwen import keras_private

_TINY = 1e-30  # a gradient times this changes no weight
_VIEWS = ("Identity", "IdentityN", "Reshape", "StopGradient", "Transpose")


def in_place(optimizer, variables):
    """A context in which an optimizer's step, if it is Adam's, needs no memory of the weights' size.

    Keras writes a step as a dozen operations, which outside of XLA each have a result of the weight's size; and its
    weight decay, which waits for no gradient, runs during the forward pass, where it has to copy what is being read.
    Here they are two operations that are part of TensorFlow, each of which runs as soon as its gradient is there.

    Args:
        optimizer: any Keras optimizer, or a `LossScaleOptimizer` around one; of others than Adam and AdamW nothing
            changes, nor under a `tf.distribute` strategy.
        variables: that it is to update.
    """
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    plain = type(optimizer) in (keras.optimizers.Adam, keras.optimizers.AdamW)
    ours = isinstance(optimizer, keras_private.OwnUpdate) and not optimizer.decays_in_update
    if not (plain or ours) or optimizer.amsgrad or tf.distribute.has_strategy():
        return contextlib.nullcontext()
    if any(variable.dtype == "float16" for variable in variables):  # which has no number as small as _TINY
        return contextlib.nullcontext()
    return keras_private.replaced_update(optimizer, lambda *arguments: _update(optimizer, *arguments))


def _update(optimizer, gradient, variable, learning_rate):
    dtype = variable.dtype
    rate, step = tf.cast(learning_rate, dtype), tf.cast(optimizer.iterations + 1, dtype)
    beta_1, beta_2, epsilon = (tf.cast(x, dtype) for x in (optimizer.beta_1, optimizer.beta_2, optimizer.epsilon))
    powers = dict(beta1_power=tf.pow(beta_1, step), beta2_power=tf.pow(beta_2, step))
    first, second = (moment.value for moment in keras_private.adam_moments(optimizer, variable))
    decay = keras_private.weight_decay(optimizer, variable)
    if decay:
        # w = (w - tiny * gradient) / (1 + tiny * l2), the one operation that scales a variable where it lies.
        share = rate * tf.cast(decay, dtype)
        shrink = dict(alpha=tf.cast(_TINY, dtype), l1=tf.zeros((), dtype), l2=share / (1 - share) / _TINY)
    # Neither operation starts without its gradient, nor while its variable is being read, where it would have to copy
    # it. Only they may wait: TensorFlow merges the powers above, the same for all variables, and if those waited, the
    # one that is left would wait for all gradients.
    with tf.control_dependencies(_readers(variable)):
        if decay:
            tf.raw_ops.ResourceApplyProximalGradientDescent(var=variable.handle, delta=gradient, **shrink)
        moments = dict(m=first.handle, v=second.handle, beta1=beta_1, beta2=beta_2, epsilon=epsilon, **powers)
        tf.raw_ops.ResourceApplyAdam(var=variable.handle, lr=rate, grad=gradient, **moments)


def _readers(variable):
    """The operations of the graph being made that read a variable's value."""
    if tf.executing_eagerly():
        return []
    graph = tf.compat.v1.get_default_graph()
    values = [op.outputs[0] for op in graph.capture(variable.handle).consumers() if op.type == "ReadVariableOp"]
    readers = set()
    while values:
        value = values.pop()
        for op in value.consumers():
            if op.type in _VIEWS:  # of the same memory, or made one with the product that reads it
                values += [y for x, y in zip(op.inputs, op.outputs, strict=False) if x is value]
            else:
                readers.add(op)
    return list(readers)
