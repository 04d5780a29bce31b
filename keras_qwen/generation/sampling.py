"""The next token from a row of logits: repetition penalty, temperature, filters, and the draw."""

import dataclasses
import functools

import keras
from keras import ops

from keras_qwen.ops.attention_dense import as_seed


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which parts of the choice are computed at all; each plan is compiled once, whatever the numbers are."""

    sample: bool
    penalty: bool
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    logits: bool = False  # hand out the logits instead: somebody else chooses

    @classmethod
    def of(cls, settings, vocab_size, logits=False):
        """The plan that `GenerationSettings` need."""
        penalty = settings.repetition_penalty != 1.0
        if logits or settings.temperature == 0:
            return cls(sample=False, penalty=penalty, logits=logits)
        return cls(
            sample=True,
            penalty=penalty,
            top_k=0 < settings.top_k < vocab_size,
            top_p=settings.top_p < 1.0,
            min_p=settings.min_p > 0.0,
        )


def choose(logits, seen, numbers, plan):
    """The next token of each row.

    The order is transformers': penalty, temperature, top-k, top-p, min-p.

    Args:
        logits: tensor (batch, vocab_size).
        seen: booleans (batch, vocab_size), the tokens of prompt and continuation so far; None without penalty.
        numbers: dict of scalars `repetition_penalty`, `temperature`, `top_k`, `top_p`, `min_p`, and `key` (2,).
        plan: `Plan`.

    Returns:
        int32 (batch,); the float32 logits after the penalty where `plan.logits`.
    """
    logits = ops.cast(logits, "float32")
    if plan.penalty:
        logits = penalize(logits, seen, numbers["repetition_penalty"])
    if plan.logits:
        return logits
    if not plan.sample:
        return ops.cast(ops.argmax(logits, axis=-1), "int32")
    logits = logits / numbers["temperature"]
    if plan.top_k or plan.top_p or plan.min_p:
        logits = _compiled_filter()(logits, numbers, plan)
    return keras.random.categorical(logits, 1, dtype="int32", seed=as_seed(numbers["key"]))[:, 0]


def penalize(logits, seen, penalty):
    """Logits of `seen` tokens made less likely: divided by `penalty` where positive, else multiplied.

    Reference: Keskar et al., 2019, "CTRL", arXiv:1909.05858, section 4.1.
    """
    return ops.where(seen, ops.where(logits > 0, logits / penalty, logits * penalty), logits)


def filter_logits(logits, numbers, plan):
    """Logits with -inf for every token that top-k, top-p or min-p rule out; equal logits are kept or dropped together.

    Each filter keeps what lies within some distance of the row's highest logit, so that nothing has to be sorted:
    top-k and top-p search for their distance bit by bit, in the float's own bits.

    Args:
        logits: float32 (batch, vocab_size), already divided by the temperature.
        numbers, plan: as of `choose`.

    Returns:
        float32 (batch, vocab_size).

    References: top-k: Fan et al., 2018, arXiv:1805.04833; top-p: Holtzman et al., 2020, arXiv:1904.09751; min-p:
    Nguyen et al., 2024, arXiv:2407.01082.
    """
    distance = ops.max(logits, axis=-1, keepdims=True) - logits
    weights = ops.exp(-distance)  # in proportion to the probabilities, the highest is 1
    bits = ops.view(distance, "int32")  # of floats from 0 on: in the same order as the floats
    kept = ops.ones_like(distance, dtype="bool")
    if plan.top_k:
        bound = _smallest_bound(bits, ops.ones_like(distance), ops.cast(numbers["top_k"], "float32"))
        kept = bits <= bound
    if plan.top_p:
        weights_left = ops.where(kept, weights, 0.0)
        mass = numbers["top_p"] * ops.sum(weights_left, axis=-1, keepdims=True)
        kept = ops.logical_and(kept, bits <= _smallest_bound(bits, weights_left, mass))
    if plan.min_p:
        kept = ops.logical_and(kept, distance <= -ops.log(numbers["min_p"]))  # of the logits: exp may round 1 down
    return ops.where(kept, logits, -float("inf"))


@functools.cache
def _compiled_filter():
    """`filter_logits`, on TensorFlow compiled by XLA: operation by operation its loops take four times as long."""
    if keras.backend.backend() != "tensorflow":
        return filter_logits
    import tensorflow as tf

    return tf.function(filter_logits, jit_compile=True, autograph=False)


def _smallest_bound(bits, weights, wanted):
    """The smallest integers (batch, 1) for which the weights of all `bits` up to it sum to `wanted` or more."""

    def halve(i, bound):
        lower = bound - ops.left_shift(ops.convert_to_tensor(1, "int32"), 30 - i)
        enough = ops.sum(ops.where(bits <= lower, weights, 0.0), axis=-1, keepdims=True) >= wanted
        return ops.where(enough, lower, bound)

    highest = ops.full((ops.shape(bits)[0], 1), 2**31 - 1, dtype="int32")
    return ops.fori_loop(0, 31, halve, highest)
