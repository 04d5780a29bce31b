"""The language-model head and its cross-entropy in one operation that never holds the logits of a batch."""

import functools
import importlib
import math
import numbers
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_qwen.backend import concrete_value
from keras_qwen.ops.linear_cross_entropy_loop import Plan, token_sums
from keras_qwen.ops.placement import batch_shards

DEFAULT_MEMORY_BUDGET = 192 * 2**20
PIECE_BYTES = 32 * 2**20
UNKNOWN_CHUNK = 256  # at most, where the number of tokens is not known: they are padded to whole chunks

_BACKEND = importlib.import_module(f"keras_qwen.ops.linear_cross_entropy_{keras.backend.backend()}")
_SUMS = functools.partial(token_sums, _BACKEND)


class TokenLoss(NamedTuple):
    """Sums over the tokens of a batch, as float32 scalars.

    Sums of micro-batches, batches or replicas add up to those of the whole; `loss` divides once, at the end.

    Args:
        loss_sum: sum of weight * cross-entropy.
        correct_sum: sum of the weights of the tokens whose largest logit is the label's. Carries no gradient.
        weight_sum: sum of the weights. Carries no gradient.
    """

    loss_sum: Any
    correct_sum: Any
    weight_sum: Any

    @property
    def loss(self):
        """Mean cross-entropy: `loss_sum / weight_sum`, and 0 (with gradients of 0) where every weight is 0."""
        return self._mean(self.loss_sum)

    @property
    def accuracy(self):
        """Share of the weight on tokens whose largest logit is the label's; 0 where every weight is 0."""
        return self._mean(self.correct_sum)

    def _mean(self, total):
        empty = ops.equal(self.weight_sum, 0.0)
        return ops.where(empty, 0.0, total / ops.where(empty, 1.0, self.weight_sum))


def linear_cross_entropy(
    hidden,
    kernel,
    labels,
    weights=None,
    *,
    transposed=False,
    chunk_size=None,
    memory_budget=DEFAULT_MEMORY_BUDGET,
    kernel_trainable=True,
    training=True,
):
    """Cross-entropy of `softmax(hidden @ kernel)` against labels, without the logits of a batch.

    For token n with hidden state h, label y and weight w, and the head's kernel W,

        loss_n = w * (logsumexp(h W) - (h W)[y]),    d loss_n / d(h W) = w * (softmax(h W) - onehot(y)).

    A loop over chunks of tokens computes a chunk's logits, its loss, and at once its share of both gradients, so
    that the logits live for one step of the loop only and are never computed again: three products in all, as
    in the plain loss. The backward pass only multiplies by the cotangent of `loss_sum` (whatever it is: the scale of a
    `LossScaleOptimizer`, or 1 / weight_sum; nothing is multiplied if it is exactly 1).

    Tokens of weight 0 are moved behind the others and chunks made of them alone are skipped: a batch of which a tenth
    is trained on costs a tenth.

    The products run in the dtype of `hidden`; softmax, loss and the sum of the kernel's gradient over chunks are
    float32. A float32 kernel beside bfloat16 hidden states is cast for the products, and its gradient stays float32.

    Args:
        hidden: (..., hidden_size) float32, bfloat16 or float16.
        kernel: (hidden_size, vocab), or (vocab, hidden_size) if `transposed`.
        labels: (...) int, the token to predict at each position. A negative one (-100) gives the position weight 0. One
            of `vocab` or more is an error; inside a traced function, where values are not known, it counts as
            `vocab - 1`.
        weights: (...) weight of each position; None: 1. Not differentiable.
        transposed: the kernel lies as an embedding's table, as with tied weights.
        chunk_size: tokens of one step of the loop. None: as many as `memory_budget` allows.
        memory_budget: bytes for what the loop works on, from which a chunk size is chosen.
        kernel_trainable: False, for a frozen head: the kernel's gradient is neither computed nor allocated.
        training: False, for an evaluation: the loss alone, one product instead of three. It has no gradients then.
            On JAX a call that is not differentiated costs one product in any case.

    Returns:
        `TokenLoss(loss_sum, correct_sum, weight_sum)`, float32 scalars. Only `loss_sum` is differentiable.

    Raises:
        ValueError: shapes that do not agree, a chunk size that is not an int from 1 to the number of tokens, or a label
            that is not in the vocabulary.

    Example:
        >>> sums = linear_cross_entropy(hidden, embeddings, labels, loss_weights, transposed=True)
        >>> sums.loss, sums.accuracy
    """
    hidden, kernel, labels, weights, plan = prepare(
        hidden,
        kernel,
        labels,
        weights,
        transposed=transposed,
        chunk_size=chunk_size,
        memory_budget=memory_budget,
        kernel_trainable=kernel_trainable,
        training=training,
    )
    if hidden.shape[0] == 0:
        return TokenLoss(*(ops.sum(hidden) * 0.0 for _ in range(3)))
    loss_sum, correct_sum = _BACKEND.differentiable_sums(_SUMS, plan, hidden, kernel, labels, weights)
    return TokenLoss(loss_sum, correct_sum, ops.sum(weights))


def prepare(hidden, kernel, labels, weights, *, transposed, chunk_size, memory_budget, kernel_trainable, training):
    """Checks the arguments of `linear_cross_entropy` and brings them into the form its loop takes.

    Returns:
        `(hidden, kernel, labels, weights, plan)`: tokens in one dimension, labels in the vocabulary, float32 weights
        that are 0 for negative labels, and the `Plan`.
    """
    hidden, kernel, labels = (ops.convert_to_tensor(x) for x in (hidden, kernel, labels))
    hidden_size, vocab = _check_shapes(hidden, kernel, labels, transposed)
    _check_labels(labels, vocab)
    weights = ops.ones_like(labels, "float32") if weights is None else ops.cast(weights, "float32")
    if not _agree(weights.shape, labels.shape):
        raise ValueError(f"weights {tuple(weights.shape)} must have the shape of labels {tuple(labels.shape)}.")

    hidden, labels, weights = (
        ops.reshape(hidden, (-1, hidden_size)),
        ops.reshape(labels, (-1,)),
        ops.reshape(weights, (-1,)),
    )
    weights = ops.stop_gradient(ops.where(labels < 0, 0.0, weights))
    labels = ops.clip(ops.cast(labels, "int32"), 0, vocab - 1)
    tokens = hidden.shape[0]
    shards = math.gcd(tokens, batch_shards()) if tokens else 1
    whole = _BACKEND.adds_in_place() or keras.distribution.distribution() is not None
    plan = Plan(
        chunk_size=1 if tokens == 0 else _chunk_size(chunk_size, memory_budget, tokens, vocab, shards),
        pieces=1 if whole else _pieces(hidden_size, vocab),
        transposed=transposed,
        gradients=training,
        kernel_gradient=training and kernel_trainable,
        kernel_dtype=keras.backend.standardize_dtype(kernel.dtype),
        shards=shards,
    )
    return hidden, kernel, labels, weights, plan


def _check_shapes(hidden, kernel, labels, transposed):
    if len(kernel.shape) != 2:
        raise ValueError(f"kernel must have two dimensions, not the shape {tuple(kernel.shape)}.")
    vocab, hidden_size = kernel.shape if transposed else kernel.shape[::-1]
    if len(hidden.shape) == 0 or hidden.shape[-1] != hidden_size:
        form = "(vocab, hidden_size)" if transposed else "(hidden_size, vocab)"
        raise ValueError(
            f"hidden {tuple(hidden.shape)} must end in the hidden size {hidden_size} of kernel {tuple(kernel.shape)}, "
            f"read as {form} because transposed={transposed}."
        )
    if not _agree(labels.shape, hidden.shape[:-1]):
        raise ValueError(
            f"labels {tuple(labels.shape)} must be hidden {tuple(hidden.shape)} without its last dimension."
        )
    if not keras.backend.is_int_dtype(labels.dtype):
        raise ValueError(f"labels must be integers, not {keras.backend.standardize_dtype(labels.dtype)}.")
    return hidden_size, vocab


def _agree(a, b):
    """Whether two shapes are one, as far as they are known."""
    return len(a) == len(b) and all(m == n or m is None or n is None for m, n in zip(a, b, strict=True))


def _check_labels(labels, vocab):
    values = concrete_value(labels)
    if values is not None and values.size and values.max() >= vocab:
        raise ValueError(f"labels must be below the vocabulary size {vocab}, found {values.max()}.")


def _chunk_size(chunk_size, memory_budget, tokens, vocab, shards):
    per_shard = tokens and tokens // shards
    if chunk_size is not None:
        if isinstance(chunk_size, bool) or not isinstance(chunk_size, numbers.Integral) or chunk_size < 1:
            raise ValueError(f"chunk_size must be a positive int, not {chunk_size!r}.")
        if tokens is not None and chunk_size > tokens:
            raise ValueError(f"chunk_size {chunk_size} is more than the {tokens} tokens there are.")
        return min(int(chunk_size), per_shard or int(chunk_size))
    most = max(1, memory_budget // (4 * vocab))
    if tokens is None:
        return min(most, UNKNOWN_CHUNK)
    chunks = -(-per_shard // most)
    # Equal chunks, so that the last one is not mostly padding; a multiple of 8 fills vector registers.
    even = -(-per_shard // chunks)
    return min(most, -(-even // 8) * 8, per_shard)


def _pieces(hidden_size, vocab):
    """A divisor of the vocabulary that brings a piece of the kernel into a processor's cache."""
    wanted = -(-4 * hidden_size * vocab // PIECE_BYTES)
    divisors = [n for n in range(1, min(vocab, 16 * wanted) + 1) if vocab % n == 0]
    return next((n for n in divisors if n >= wanted), divisors[-1])
