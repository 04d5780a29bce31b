"""Direct preference optimisation: the loss, and the training step of pairs of answers."""

import dataclasses

import keras
from keras import ops

from keras_qwen.ops.linear_cross_entropy import TokenLoss
from keras_qwen.training.step import TokenStep

REFERENCE = "reference_log_probs"


@keras.saving.register_keras_serializable(package="keras_qwen")
@dataclasses.dataclass(frozen=True)
class DPO:
    """Direct preference optimisation, as `compile(loss=DPO())`.

    Rows come in pairs: row 2i of a batch is the answer that was preferred, row 2i + 1 the other one, and loss weights
    that are not 0 say which tokens are the answer's. With `logp` the sum of their log-probabilities, the loss of a
    pair is `-log sigmoid(beta * ((logp - reference) of the preferred - (logp - reference) of the other))`.

    The reference is the base of the model, with its adapter off; or what the inputs hold as `reference_log_probs`
    (rows,), computed before by `model.score`.

    Args:
        beta: how strongly the model is held to the reference.
        label_smoothing: the share of pairs that are taken to be labelled the wrong way round.

    Raises:
        ValueError: for values out of range.

    Example:
        >>> model.enable_lora(16)
        >>> model.compile(kq.training.AdamW(1e-5), loss=kq.training.DPO(beta=0.1))
        >>> model.fit(pairs)

    References: Rafailov et al., 2023, "Direct Preference Optimization", arXiv:2305.18290, equation 7; label smoothing:
    Mitchell, 2023, "A note on DPO with noisy preferences".
    """

    beta: float = 0.1
    label_smoothing: float = 0.0

    def __post_init__(self):
        if not self.beta > 0:
            raise ValueError(f"beta must be positive, not {self.beta}.")
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(f"label_smoothing must be in [0, 0.5), not {self.label_smoothing}.")

    def get_config(self):
        """The arguments, for saving a compiled model."""
        return dataclasses.asdict(self)

    @classmethod
    def from_config(cls, config):
        """The loss of a saved model."""
        return cls(**config)

    def __call__(self, margins):
        """The loss of pairs (pairs,) whose log-probabilities exceed the reference's by `margins`."""
        rewards = self.beta * margins
        right, wrong = ops.softplus(-rewards), ops.softplus(rewards)
        return (1.0 - self.label_smoothing) * right + self.label_smoothing * wrong


class PreferenceStep(TokenStep):
    """The training of pairs; `logs` have the pairs' loss, and as `reward_accuracy` how many are ordered right.

    Each row's weights are made to sum to one half, so that a pair weighs 1 as a token does elsewhere.

    Args:
        dpo: `DPO`.
        log_probs: called with `(inputs, labels, mask, training=...)`; returns log-probabilities (rows, length).
        reference_log_probs: the same of the reference model, without a gradient.
        micro_batch_size: rows of a micro-batch, an even number, or None for whole batches.
    """

    accuracy_name = "reward_accuracy"
    own_inputs = (REFERENCE,)

    def __init__(self, dpo, log_probs, reference_log_probs, micro_batch_size=None):
        super().__init__(self.pair_loss, micro_batch_size)
        if self.micro_batch_size is not None and self.micro_batch_size % 2:
            raise ValueError(f"micro_batch_size={micro_batch_size} would part a pair: give an even number of rows.")
        self.dpo, self.log_probs, self.reference_log_probs = dpo, log_probs, reference_log_probs

    def batch(self, model, data):
        inputs, labels, weights = super().batch(model, data)
        reference = data[0].get(REFERENCE) if isinstance(data[0], dict) else None
        rows = labels.shape[0]
        if rows is not None and rows % 2:
            raise ValueError(f"A batch of {rows} rows does not consist of pairs: row 2i is preferred to row 2i + 1.")
        if reference is not None:
            inputs[REFERENCE] = ops.cast(reference, "float32")
        mask = ops.cast(ops.not_equal(weights, 0), "float32")
        answers = ops.sum(mask, axis=1, keepdims=True)
        return inputs, labels, mask * (0.5 / ops.maximum(answers, 1.0))

    def pair_loss(self, inputs, labels, weights, training=False):
        """The pairs' losses, how many are ordered right, and their number, each weighted and summed up."""
        inputs = dict(inputs)
        reference = inputs.pop(REFERENCE, None)
        mask = ops.cast(ops.not_equal(weights, 0), "float32")
        if reference is None:
            reference = ops.sum(ops.stop_gradient(self.reference_log_probs(inputs, labels, mask)), axis=1)
        gains = ops.sum(self.log_probs(inputs, labels, mask, training=training), axis=1) - reference
        margins = gains[::2] - gains[1::2]
        of_rows = ops.sum(weights, axis=1)
        pairs = of_rows[::2] + of_rows[1::2]
        right = ops.cast(margins > 0, "float32")
        return TokenLoss(ops.sum(pairs * self.dpo(margins)), ops.sum(pairs * right), ops.sum(pairs))
