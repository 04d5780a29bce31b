"""The loop of `linear_cross_entropy`, the same on every backend."""

from typing import NamedTuple

from keras import ops

from keras_qwen.ops.placement import placed


class Plan(NamedTuple):
    """What of the computation is fixed when it is traced.

    Args:
        chunk_size: tokens of one step of the loop.
        pieces: parts of the vocabulary, all of one size, that a step takes one after the other: small enough for a
            processor's cache, and so that neither the products nor adding up the kernel's gradient need a second
            array of the kernel's size.
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


def token_sums(backend, plan, hidden, kernel, labels, weights):
    """Sums over all tokens, and the gradients of the first of them: one loop over chunks of tokens.

    Args:
        backend: module of what the backend does in its own way; `linear_cross_entropy_jax` describes the functions.
        plan: `Plan`.
        hidden: (tokens, hidden_size).
        kernel: as `linear_cross_entropy` takes it.
        labels: (tokens,) int32 in the vocabulary.
        weights: (tokens,) float32.

    Returns:
        (loss_sum, correct_sum, gradient of hidden or None, gradient of the kernel or None). The latter is float32,
        (pieces, vocab / pieces, hidden_size) if transposed, else (hidden_size, pieces, vocab / pieces).
    """
    tokens, hidden_size = ops.shape(hidden)
    chunk_size = plan.chunk_size
    chunks = (tokens + chunk_size - 1) // chunk_size

    # Tokens that count come first: `place` is where each token goes, `order` which token each place holds.
    counts = ops.cast(ops.not_equal(weights, 0.0), "int32")
    live = ops.sum(counts)
    place = ops.where(counts > 0, ops.cumsum(counts) - 1, live + ops.cumsum(1 - counts) - 1)
    order = ops.pad(ops.argsort(place), [[0, chunks * chunk_size - tokens]])
    filled = ops.arange(chunks * chunk_size) < tokens
    steps = backend.most(plan, (live + chunk_size - 1) // chunk_size)

    hidden_chunks = ops.reshape(ops.take(hidden, order, axis=0), (chunks, chunk_size, hidden_size))
    label_chunks = ops.reshape(ops.take(labels, order), (chunks, chunk_size))
    weight_chunks = ops.reshape(ops.where(filled, ops.take(weights, order), 0.0), (chunks, chunk_size))
    head = ChunkedHead(backend, plan, kernel, hidden.dtype)

    def step(index, loss_sum, correct_sum, *state):
        chunk = hidden_chunks[index], label_chunks[index], weight_chunks[index]
        losses, correct, powers, log_shares = head.read(*chunk, state[0] if state else None)
        loss_sum = loss_sum + ops.sum(losses * chunk[2])
        correct_sum = correct_sum + ops.sum(ops.where(correct, chunk[2], 0.0))
        if not plan.gradients:
            return index + 1, loss_sum, correct_sum
        share, *kernel_gradient = head.differentiate(*chunk, powers, log_shares, *state[2:])
        hidden_gradient = backend.put(state[1], index, ops.cast(share, hidden.dtype))
        return index + 1, loss_sum, correct_sum, powers, hidden_gradient, *kernel_gradient

    state = [ops.zeros((), "int32"), ops.zeros((), "float32"), ops.zeros((), "float32")]
    if plan.gradients:
        state.append(backend.zeros((plan.pieces, chunk_size, head.width), "float32"))
        state.append(backend.zeros((chunks, chunk_size, hidden_size), hidden.dtype))
    if plan.kernel_gradient:
        shape = (plan.pieces, head.width, hidden_size) if plan.transposed else (hidden_size, plan.pieces, head.width)
        state.append(backend.zeros(shape, "float32"))
    _, loss_sum, correct_sum, *state = backend.while_loop(lambda index, *_: index < steps, step, state)

    hidden_gradient = ops.take(ops.reshape(state[1], (-1, hidden_size)), place, axis=0) if plan.gradients else None
    return loss_sum, correct_sum, hidden_gradient, state[2] if plan.kernel_gradient else None


class ChunkedHead:
    """One chunk of tokens against the kernel, one piece of the vocabulary after the other."""

    def __init__(self, backend, plan, kernel, dtype):
        self.backend = backend
        self.plan = plan
        self.dtype = dtype
        # Pieces are cast one by one, so that no copy of the kernel is made for it.
        self.kernel = ops.cast(kernel, dtype) if plan.pieces == 1 else kernel
        self.kernel = placed(self.kernel, *(("vocab", "embed") if plan.transposed else ("embed", "vocab")))
        self.hidden_size, vocab = kernel.shape[::-1] if plan.transposed else kernel.shape
        self.width = vocab // plan.pieces

    def read(self, states, labels, weights, powers):
        """Losses and hits (tokens,), and what `differentiate` needs of the softmax.

        The softmax over pieces is the online one of Milakov and Gimelshein, 2018, arXiv:1805.02867: `powers`
        (pieces, tokens, width) holds exp(logits - m) where m is the largest logit up to that piece, and `log_shares`
        (pieces, tokens, 1) what is to be added to m for the logarithm of the whole sum.
        """
        backend, tokens = self.backend, states.shape[0]

        def piece(index, largest, total, of_label, correct, *stored):
            logits = backend.product(states, self._piece(index), transpose_b=self.plan.transposed)
            logits = placed(logits, "tokens", "vocab")
            place = labels - index * self.width
            here = ops.logical_and(place >= 0, place < self.width)
            top, picked, first = backend.top(logits, ops.clip(place, 0, self.width - 1))
            of_label = ops.where(here[:, None], picked, of_label)
            correct = ops.where(top[:, 0] > largest[:, 0], ops.logical_and(first, here), correct)
            new = ops.maximum(largest, top)
            powers = backend.materialize(ops.exp(logits - new))
            total = total * ops.exp(largest - new) + ops.sum(powers, axis=1, keepdims=True)
            if stored:
                stored = backend.put(stored[0], index, powers), backend.put(stored[1], index, new)
            return new, total, of_label, correct, *stored

        zero = ops.zeros((tokens, 1), "float32")
        state = [zero - float("inf"), zero, zero, ops.zeros((tokens,), "bool")]
        if self.plan.gradients:
            state += [powers, backend.zeros((self.plan.pieces, tokens, 1), "float32")]
        largest, total, of_label, correct, *stored = self._for_each_piece(piece, state)
        log_sum = largest + ops.log(total)
        powers, maxima = stored or (None, None)
        return (log_sum - of_label)[:, 0], correct, powers, maxima - log_sum if stored else None

    def differentiate(self, states, labels, weights, powers, log_shares, *kernel_gradient):
        """The chunk's gradient of hidden (tokens, hidden_size), and kernel_gradient with its share added."""
        backend, transposed = self.backend, self.plan.transposed
        weights = weights[:, None]

        def piece(index, hidden_gradient, *kernel_gradient):
            slopes = powers[index] * (weights * ops.exp(log_shares[index]))
            slopes = backend.subtract_at(slopes, labels - index * self.width, weights)
            slopes = ops.cast(slopes, self.dtype)
            hidden_gradient += backend.product(slopes, self._piece(index), transpose_b=not transposed)
            if kernel_gradient:
                left, right = (slopes, states) if transposed else (states, slopes)
                share = backend.product(left, right, transpose_a=True)
                kernel_gradient = [backend.add(kernel_gradient[0], index, share, axis=0 if transposed else 1)]
            return hidden_gradient, *kernel_gradient

        return self._for_each_piece(piece, [ops.zeros(states.shape, "float32"), *kernel_gradient])

    def _piece(self, index):
        if self.plan.pieces == 1:
            return self.kernel
        if self.plan.transposed:
            piece = ops.slice(self.kernel, (index * self.width, 0), (self.width, self.hidden_size))
        else:
            piece = ops.slice(self.kernel, (0, index * self.width), (self.hidden_size, self.width))
        return ops.cast(piece, self.dtype)

    def _for_each_piece(self, piece, state):
        if self.plan.pieces == 1:
            return piece(0, *state)
        start = [ops.zeros((), "int32"), *state]
        step = lambda index, *state: (index + 1, *piece(index, *state))  # noqa: E731
        return self.backend.while_loop(lambda index, *_: index < self.plan.pieces, step, start)[1:]
