"""`linear_cross_entropy` on a mesh of TensorFlow's DTensor.

Logits are split as the batch is and, over `model`, along the vocabulary, so that the softmax's sums run over devices
and no device ever has all logits of a token. Each device takes its tokens in chunks, one after the other; other than on
a single device, chunks without a trained token are not skipped.
"""

import tensorflow as tf

from keras_qwen.ops.placement import placed

_MOST_CHUNKS = 32  # each is a part of the graph


def differentiable_sums(plan, hidden, kernel, labels, weights):
    """(loss_sum, correct_sum), the first of them differentiable in hidden and kernel."""
    constants = [tf.stop_gradient(x) for x in (hidden, kernel, labels, weights)]
    if not plan.gradients:
        return _sums(plan, *constants)[:2]

    @tf.custom_gradient
    def run(*trained):
        loss_sum, correct_sum, of_hidden, of_kernel = _sums(plan, *constants)

        def backward(scale, _):
            gradients = [of_hidden * tf.cast(scale, hidden.dtype)]
            return gradients + ([tf.cast(of_kernel * scale, kernel.dtype)] if plan.kernel_gradient else [])

        return (loss_sum, correct_sum), backward

    return run(hidden, kernel) if plan.kernel_gradient else run(hidden)


def token_log_probs(plan, hidden, kernel, labels):
    """The log-probability of each label (tokens,).

    Other than on a single device, the backward pass keeps the logits, split as they are.
    """
    head = _head(plan, hidden, kernel)
    found = []
    for states, chosen in zip(_chunks(plan, hidden), _chunks(plan, labels), strict=True):
        logits = _logits(plan, head, states)
        shifted = logits - tf.stop_gradient(tf.reduce_max(logits, axis=-1, keepdims=True))
        at_label = tf.range(logits.shape[-1], dtype=chosen.dtype) == tf.expand_dims(chosen, -1)
        of_label = tf.reduce_sum(tf.where(at_label, shifted, 0.0), axis=-1)
        found.append(of_label - tf.math.log(tf.reduce_sum(tf.exp(shifted), axis=-1)))
    return tf.reshape(tf.concat(found, axis=1), labels.shape)


def _head(plan, hidden, kernel):
    return tf.cast(placed(kernel, *(("vocab", "embed") if plan.transposed else ("embed", "vocab"))), hidden.dtype)


def _logits(plan, head, states):
    logits = tf.cast(tf.matmul(states, head, transpose_b=plan.transposed), "float32")
    return placed(logits, "batch", "tokens", "vocab")


def _sums(plan, hidden, kernel, labels, weights):
    head = _head(plan, hidden, kernel)
    parts = [_chunks(plan, x) for x in (hidden, labels, weights)]
    loss_sum = correct_sum = tf.zeros(())
    of_hidden, of_kernel = [], None
    for chunk in zip(*parts, strict=True):
        if of_hidden:
            with tf.control_dependencies([of_hidden[-1]]):  # or all chunks' logits would be there at once
                chunk = tuple(tf.identity(x) for x in chunk)
        losses, correct, slopes = _chunk(plan, head, *chunk)
        loss_sum, correct_sum = loss_sum + losses, correct_sum + correct
        if plan.gradients:
            slopes = tf.cast(slopes, hidden.dtype)
            of_hidden.append(tf.cast(tf.matmul(slopes, head, transpose_b=not plan.transposed), hidden.dtype))
        if plan.kernel_gradient:
            left, right = (slopes, chunk[0]) if plan.transposed else (chunk[0], slopes)
            share = tf.cast(tf.einsum("stm,stn->mn", left, right), "float32")
            of_kernel = share if of_kernel is None else of_kernel + share
    of_hidden = tf.reshape(tf.concat(of_hidden, axis=1), hidden.shape) if plan.gradients else None
    return loss_sum, correct_sum, of_hidden, of_kernel


def _chunks(plan, x):
    """Pieces (shards, tokens, ...) of all shards' tokens."""
    tokens = x.shape[0] // plan.shards
    size = max(plan.chunk_size, -(-tokens // _MOST_CHUNKS))
    x = placed(tf.reshape(x, (plan.shards, tokens, *x.shape[1:])), "batch", *["tokens"] * len(x.shape))
    return [x[:, start : start + size] for start in range(0, tokens, size)]


def _chunk(plan, head, states, labels, weights):
    """Sums of loss and hits, and the slopes of the loss (shards, tokens, vocab) by the logits."""
    logits = _logits(plan, head, states)
    columns, labels = tf.range(logits.shape[-1], dtype=labels.dtype), tf.expand_dims(labels, -1)
    largest = tf.reduce_max(logits, axis=-1, keepdims=True)
    powers = tf.exp(logits - largest)
    total = tf.reduce_sum(powers, axis=-1, keepdims=True)
    at_label = columns == labels
    of_label = tf.reduce_sum(tf.where(at_label, logits, 0.0), axis=-1, keepdims=True)
    earlier = tf.logical_and(columns < labels, logits == largest)
    first = tf.logical_and(of_label == largest, tf.logical_not(tf.reduce_any(earlier, axis=-1, keepdims=True)))
    weights = tf.expand_dims(weights, -1)
    loss_sum = tf.reduce_sum((largest + tf.math.log(total) - of_label) * weights)
    correct_sum = tf.reduce_sum(tf.where(first, weights, 0.0))
    return loss_sum, correct_sum, weights * (powers / total - tf.cast(at_label, "float32"))
