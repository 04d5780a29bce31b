"""The steps on PyTorch, run eagerly."""

import keras
import torch

from keras_qwen.training.step import add, zero_sums


def train_step(step, model, data):
    unscaled = step.batch(model, data)
    weight_sum = unscaled[2].sum()
    batch = step.scaled(model.optimizer, unscaled)
    model.zero_grad()
    sums = zero_sums()
    for part in _parts(step, batch, training=True):
        more = step.token_loss(*part, training=True)
        more.loss_sum.backward()  # torch adds up the gradients of the micro-batches
        sums = add(sums, type(more)(*(x.detach() for x in more)))
    variables = model.trainable_weights
    gradients = [v.value.grad for v in variables]
    with torch.no_grad():
        logs = step.report(model, step.unscaled(model.optimizer, sums, weight_sum), gradients, unscaled)
        model.optimizer.apply(gradients, variables)
    return logs


def test_step(step, model, data):
    batch, sums = step.batch(model, data), zero_sums()
    with torch.no_grad():
        for part in _parts(step, batch, training=False):
            sums = add(sums, step.token_loss(*part, training=False))
    return step.report(model, sums)


def _parts(step, batch, *, training):
    micro = step.micro_batches(batch, training=training)
    if micro is None:
        return [batch]
    return [keras.tree.map_structure(lambda x, i=i: x[i], micro) for i in range(len(micro[1]))]


def sum_of_squares(x):
    """Float32, without an array of the squares."""
    return torch.linalg.vector_norm(x, dtype=torch.float32).square()


def compiled(function, *arguments):
    """`function(*arguments)`."""
    return function(*arguments)
