"""The steps on PyTorch, run eagerly."""

import keras
import torch

from keras_qwen.training.step import add, zero_sums


def train_step(step, model, data):
    batch = step.batch(model, data)
    factor = step.loss_factor(model, batch[2].sum())
    model.zero_grad()
    sums = zero_sums()
    for part in _parts(step, batch, training=True):
        more = step.token_loss(*part, training=True)
        (more.loss_sum * factor).backward()  # torch adds up the gradients of the micro-batches
        sums = add(sums, type(more)(*(x.detach() for x in more)))
    variables = model.trainable_weights
    with torch.no_grad():
        model.optimizer.apply([v.value.grad for v in variables], variables)
    return step.report(model, sums)


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
