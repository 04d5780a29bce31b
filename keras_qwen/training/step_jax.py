"""The steps on JAX: pure functions of the variables' values."""

import jax
import keras

from keras_qwen.ops.placement import constrained, update_layouts
from keras_qwen.training.step import add, zero_sums


def train_step(step, model, state, data):
    trainable, non_trainable, optimizer, metrics = state
    unscaled = step.batch(model, data)
    weight_sum = unscaled[2].sum()
    with keras.StatelessScope(state_mapping=list(zip(model.optimizer.variables, optimizer, strict=True))):
        batch = step.scaled(model.optimizer, unscaled)

    def loss(trainable, non_trainable, batch):
        sums, non_trainable = _sums(step, model, trainable, non_trainable, batch, training=True)
        return sums.loss_sum, (sums, non_trainable)

    layouts = update_layouts(model.trainable_variables)

    def gradient(*arguments):
        gradients, aux = jax.grad(loss, has_aux=True)(*arguments)
        return constrained(gradients, layouts), aux

    micro = step.micro_batches(batch, training=True)
    if micro is None:
        gradients, (sums, non_trainable) = gradient(trainable, non_trainable, batch)
    else:

        def accumulate(carry, part):
            total, sums, non_trainable = carry
            gradients, (more, non_trainable) = gradient(trainable, non_trainable, part)
            total = jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, gradients)
            return (total, add(sums, more), non_trainable), None

        zeros = constrained([jax.numpy.zeros(v.shape, "float32") for v in trainable], layouts)
        (gradients, sums, non_trainable), _ = jax.lax.scan(accumulate, (zeros, zero_sums(), non_trainable), micro)
        gradients = jax.tree.map(lambda g, v: g.astype(v.dtype), gradients, trainable)
    logs, metrics = _report(step, model, metrics, sums, gradients, optimizer, weight_sum, unscaled)
    trainable = constrained(trainable, layouts)
    trainable, optimizer = model.optimizer.stateless_apply(optimizer, gradients, trainable)
    return logs, (trainable, non_trainable, optimizer, metrics)


def test_step(step, model, state, data):
    trainable, non_trainable, metrics = state
    batch = step.batch(model, data)
    micro = step.micro_batches(batch, training=False)
    if micro is None:
        sums, non_trainable = _sums(step, model, trainable, non_trainable, batch, training=False)
    else:

        def accumulate(carry, part):
            sums, non_trainable = carry
            more, non_trainable = _sums(step, model, trainable, non_trainable, part, training=False)
            return (add(sums, more), non_trainable), None

        (sums, non_trainable), _ = jax.lax.scan(accumulate, (zero_sums(), non_trainable), micro)
    logs, metrics = _report(step, model, metrics, sums)
    return logs, (trainable, non_trainable, metrics)


def _sums(step, model, trainable, non_trainable, batch, *, training):
    variables = [*model.trainable_variables, *model.non_trainable_variables]
    mapping = list(zip(variables, [*trainable, *non_trainable], strict=True))
    with keras.StatelessScope(state_mapping=mapping) as scope:
        sums = step.token_loss(*batch, training=training)
    return sums, [scope.get_current_value(v) for v in model.non_trainable_variables]


def _report(step, model, metrics, sums, gradients=None, optimizer=(), weight_sum=None, batch=None):
    variables = model.metrics_variables
    mapping = list(zip(variables, metrics, strict=True))
    if gradients is not None:
        mapping += zip(model.optimizer.variables, optimizer, strict=True)
    with keras.StatelessScope(state_mapping=mapping) as scope:
        if gradients is not None:
            sums = step.unscaled(model.optimizer, sums, weight_sum)
        logs = step.report(model, sums, gradients, batch)
    return logs, [scope.get_current_value(v) for v in variables]


def sum_of_squares(x):
    """Float32, without an array of the squares."""
    return jax.numpy.sum(jax.numpy.square(x.astype("float32")))


def compiled(function, *arguments):
    """`function(*arguments)`: the step is one operation as it is."""
    return function(*arguments)
