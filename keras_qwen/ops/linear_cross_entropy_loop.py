"""The loop of `linear_cross_entropy`, the same on every backend."""

import importlib
from typing import NamedTuple

import keras
from keras import ops


class Plan(NamedTuple):
    """What of the computation is fixed when it is traced.

    Args:
        chunk_size: tokens of one step of the loop.
        pieces: parts in which a chunk's kernel gradient is added to the total, so that no second array of the
            kernel's size is needed. They divide the kernel's first dimension.
        transposed: the kernel is (vocab, hidden_size).
        gradients: compute the gradient of hidden.
        kernel_gradient: compute the gradient of the kernel as well.
        kernel_dtype: dtype in which the kernel's gradient is returned.
        shards: parts of the batch that lie on different devices. Each is chunked by itself, so that every device has
            work in every step.
    """

    chunk_size: int
    pieces: int
    transposed: bool
    gradients: bool
    kernel_gradient: bool
    kernel_dtype: str
    shards: int


def backend_module():
    """What the running backend does in its own way; see `linear_cross_entropy_jax` for the functions."""
    return importlib.import_module(f"keras_qwen.ops.linear_cross_entropy_{keras.backend.backend()}")


def token_sums(plan, hidden, kernel, labels, weights):
    """Sums over all tokens, and the gradients of the first of them: one loop over chunks of tokens.

    Args:
        plan: `Plan`.
        hidden: (tokens, hidden_size).
        kernel: as `linear_cross_entropy` takes it.
        labels: (tokens,) int32 in the vocabulary.
        weights: (tokens,) float32.

    Returns:
        (loss_sum, correct_sum, gradient of hidden or None, gradient of the kernel or None). The latter is float32,
        (pieces, rows / pieces, columns).
    """
    primitives = backend_module()
    tokens, hidden_size = ops.shape(hidden)
    chunk_size = plan.chunk_size
    chunks = (tokens + chunk_size - 1) // chunk_size

    # Tokens that count come first; `place` is where each token goes, `order` which token each place holds.
    counts = ops.cast(ops.not_equal(weights, 0.0), "int32")
    live = ops.sum(counts)
    place = ops.where(counts > 0, ops.cumsum(counts) - 1, live + ops.cumsum(1 - counts) - 1)
    order = ops.pad(ops.argsort(place), [[0, chunks * chunk_size - tokens]])
    filled = ops.arange(chunks * chunk_size) < tokens
    steps = primitives.most(plan, (live + chunk_size - 1) // chunk_size)

    hidden_chunks = ops.reshape(ops.take(hidden, order, axis=0), (chunks, chunk_size, hidden_size))
    label_chunks = ops.reshape(ops.take(labels, order), (chunks, chunk_size))
    weight_chunks = ops.reshape(ops.where(filled, ops.take(weights, order), 0.0), (chunks, chunk_size))
    matrix = ops.cast(kernel, hidden.dtype)

    def step(index, loss_sum, correct_sum, *gradients):
        states, chunk_weights = hidden_chunks[index], weight_chunks[index]
        logits = primitives.product(states, matrix, transpose_b=plan.transposed)
        losses, correct, slopes = primitives.cross_entropy(logits, label_chunks[index], chunk_weights, plan.gradients)
        sums = loss_sum + ops.sum(losses * chunk_weights), correct_sum + ops.sum(ops.where(correct, chunk_weights, 0.0))
        if not plan.gradients:
            return (index + 1, *sums)
        slopes = ops.cast(slopes, hidden.dtype)
        hidden_gradient, *rest = gradients
        share = primitives.product(slopes, matrix, transpose_b=not plan.transposed)
        hidden_gradient = primitives.put(hidden_gradient, index, ops.cast(share, hidden.dtype))
        if plan.kernel_gradient:
            left, right = (slopes, states) if plan.transposed else (states, slopes)
            rest = [_add_outer(primitives, rest[0], left, right)]
        return (index + 1, *sums, hidden_gradient, *rest)

    state = [ops.zeros((), "int32"), ops.zeros(()), ops.zeros(())]
    if plan.gradients:
        state.append(primitives.zeros((chunks, chunk_size, hidden_size), hidden.dtype))
    if plan.kernel_gradient:
        rows, columns = kernel.shape
        state.append(primitives.zeros((plan.pieces, rows // plan.pieces, columns), "float32"))
    _, loss_sum, correct_sum, *gradients = primitives.while_loop(lambda index, *_: index < steps, step, state)

    hidden_gradient = kernel_gradient = None
    if plan.gradients:
        hidden_gradient = ops.take(ops.reshape(gradients[0], (-1, hidden_size)), place, axis=0)
    if plan.kernel_gradient:
        kernel_gradient = gradients[1]
    return loss_sum, correct_sum, hidden_gradient, kernel_gradient


def _add_outer(primitives, total, left, right):
    """`total + left.T @ right`, piece by piece of the rows of total (pieces, rows, columns)."""
    pieces, rows, _ = total.shape
    if pieces == 1:
        return total + primitives.product(left, right, transpose_a=True)[None]

    def step(index, total):
        part = ops.slice(left, (0, index * rows), (left.shape[0], rows))
        return index + 1, primitives.add(total, index, primitives.product(part, right, transpose_a=True))

    return primitives.while_loop(lambda index, _: index < pieces, step, [ops.zeros((), "int32"), total])[1]
