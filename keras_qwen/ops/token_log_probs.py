"""The log-probability of each token, differentiable, without the logits of a batch."""

import importlib

import keras
from keras import ops

from keras_qwen.ops.attention_backend import backend_module
from keras_qwen.ops.linear_cross_entropy import DEFAULT_MEMORY_BUDGET, prepare
from keras_qwen.ops.linear_cross_entropy_loop import ChunkedHead, token_sums
from keras_qwen.ops.placement import on_dtensor

_BACKEND = importlib.import_module(f"keras_qwen.ops.linear_cross_entropy_{keras.backend.backend()}")


def token_log_probs(
    hidden,
    kernel,
    labels,
    mask=None,
    *,
    transposed=False,
    chunk_size=None,
    memory_budget=DEFAULT_MEMORY_BUDGET,
    kernel_trainable=True,
    training=True,
):
    """`log softmax(hidden @ kernel)` at the labels, without the logits of a batch.

    What `linear_cross_entropy` sums up, token by token, for losses that are no sum of them, such as DPO's. A loop over
    chunks of tokens computes a chunk's logits and keeps a number a token. With a frozen kernel it computes, in the same
    step, what the gradient of hidden is up to a factor a token: two products, and the backward pass multiplies. With a
    trained one the backward pass is that of `linear_cross_entropy`, which computes the logits again: four products.

    Args:
        hidden: (..., hidden_size) float32, bfloat16 or float16.
        kernel: (hidden_size, vocab), or (vocab, hidden_size) if `transposed`.
        labels: (...) int, the token to predict at each position; at a negative one the result is 0.
        mask: (...) where it is 0, the result is 0 and costs nothing; None: nowhere.
        transposed, chunk_size, memory_budget: as of `linear_cross_entropy`.
        kernel_trainable: False, for a frozen head.
        training: False, where no gradient is taken: one product.

    Returns:
        float32 tensor (...), log-probabilities.

    Raises:
        ValueError: as `linear_cross_entropy`.

    Example:
        >>> token_log_probs(hidden, embeddings, labels, transposed=True, training=False).shape
        (2, 128)
    """
    shape = ops.shape(labels)
    mask = None if mask is None else ops.cast(ops.not_equal(mask, 0), "float32")
    hidden, kernel, labels, mask, plan = prepare(
        hidden,
        kernel,
        labels,
        mask,
        transposed=transposed,
        chunk_size=chunk_size,
        memory_budget=memory_budget,
        kernel_trainable=kernel_trainable,
        training=training,
    )
    if hidden.shape[0] == 0:
        return ops.reshape(ops.sum(hidden, axis=-1) * 0.0, shape)
    if on_dtensor():
        module = importlib.import_module("keras_qwen.ops.linear_cross_entropy_mesh_tensorflow")
        return ops.reshape(ops.where(mask > 0, module.token_log_probs(plan, hidden, kernel, labels), 0.0), shape)
    inputs, constants = (hidden, kernel), (labels, mask)
    if not plan.kernel_gradient:
        inputs, constants = (hidden,), (ops.stop_gradient(kernel), labels, mask)
    return ops.reshape(backend_module().call_with_gradient(_forward, _backward, plan, inputs, constants), shape)


def _forward(plan, inputs, constants):
    hidden, kernel, labels, mask = (*inputs, *constants)
    tokens, chunk_size = ops.shape(hidden)[0], plan.chunk_size
    chunks = (tokens + chunk_size - 1) // chunk_size
    place, order, steps = _order(plan, mask, tokens, chunks)
    hidden_chunks = ops.reshape(ops.take(hidden, order, axis=0), (chunks, chunk_size, hidden.shape[1]))
    label_chunks = ops.reshape(ops.take(labels, order), (chunks, chunk_size))
    head = ChunkedHead(_BACKEND, plan._replace(kernel_gradient=False), kernel, hidden.dtype)
    keeps_gradient = plan.gradients and not plan.kernel_gradient
    head.plan = head.plan._replace(gradients=keeps_gradient)
    ones = ops.ones((chunk_size,), "float32")

    def step(index, losses, *state):
        chunk = hidden_chunks[index], label_chunks[index], ones
        loss, _, powers, log_shares = head.read(*chunk, state[0] if state else None)
        losses = _BACKEND.put(losses, index, loss[:, None])
        if not keeps_gradient:
            return index + 1, losses
        (slope,) = head.differentiate(*chunk, powers, log_shares)
        return index + 1, losses, powers, _BACKEND.put(state[1], index, ops.cast(slope, hidden.dtype))

    state = [ops.zeros((), "int32"), _BACKEND.zeros((chunks, chunk_size, 1), "float32")]
    if keeps_gradient:
        state.append(_BACKEND.zeros((plan.pieces, chunk_size, head.width), "float32"))
        state.append(_BACKEND.zeros((chunks, chunk_size, hidden.shape[1]), hidden.dtype))
    _, losses, *state = _BACKEND.while_loop(lambda index, *_: index < steps, step, state)

    back = lambda x: ops.take(ops.reshape(x, (chunks * chunk_size, -1)), place, axis=0)  # noqa: E731
    log_probs = ops.where(mask > 0, -back(losses)[:, 0], 0.0)
    return log_probs, (back(state[1]),) if keeps_gradient else ()


def _order(plan, mask, tokens, chunks):
    """`(place, order, steps)`: where each token goes, which token each place holds, and how many chunks have work."""
    size = chunks * plan.chunk_size
    if plan.shards > 1:
        # Each chunk takes tokens of every device.
        columns = ops.arange(size) % plan.shards
        order = ops.minimum(columns * (tokens // plan.shards) + ops.arange(size) // plan.shards, tokens - 1)
        index = ops.arange(tokens)
        return index % (tokens // plan.shards) * plan.shards + index // (tokens // plan.shards), order, chunks
    counts = ops.cast(mask > 0, "int32")
    live = ops.sum(counts)
    place = ops.where(counts > 0, ops.cumsum(counts) - 1, live + ops.cumsum(1 - counts) - 1)
    order = ops.pad(ops.argsort(place), [[0, size - tokens]])
    return place, order, (live + plan.chunk_size - 1) // plan.chunk_size


def _backward(plan, inputs, constants, saved, gradient):
    hidden, kernel, labels, mask = (*inputs, *constants)
    slopes = -ops.cast(gradient, "float32") * mask
    if not plan.kernel_gradient:
        return (ops.cast(ops.cast(saved[0], "float32") * slopes[:, None], hidden.dtype),)
    if plan.shards > 1:
        plan = plan._replace(shards=1)
    *_, of_hidden, of_kernel = token_sums(_BACKEND, plan, hidden, kernel, labels, slopes)
    return of_hidden, ops.cast(ops.reshape(of_kernel, kernel.shape), kernel.dtype)
