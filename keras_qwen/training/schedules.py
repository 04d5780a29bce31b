"""WarmupStableDecay: a learning rate that rises, stays, and falls at the end.

Warm-up and cosine is Keras's own: `keras.optimizers.schedules.CosineDecay(0.0, steps, warmup_target=rate,
warmup_steps=n)`.
"""

import math

import keras
from keras import ops


@keras.saving.register_keras_serializable(package="keras_qwen")
class WarmupStableDecay(keras.optimizers.schedules.LearningRateSchedule):
    """Linear warm-up, then the full rate, then a decay over the last steps.

    What was trained at the full rate can be trained on with more steps, which a cosine does not allow.

    Args:
        learning_rate: the full rate.
        steps: of the whole training: `epochs * steps_per_epoch`.
        warmup_steps: the rate rises from 0 to full over so many.
        decay_steps: it falls over so many, the last ones.
        final: the share of the full rate that is left at the end.
        decay: `"linear"`, `"cosine"` or `"sqrt"` (1 - sqrt).

    Raises:
        ValueError: for steps that are negative, or more than there are; for an unknown decay.

    Example:
        >>> schedule = kq.training.WarmupStableDecay(2e-4, steps=1000, warmup_steps=50, decay_steps=200)
        >>> model.compile(kq.training.AdamW(schedule))

    References: Hu et al., 2024, "MiniCPM", arXiv:2404.06395; Hägele et al., 2024, arXiv:2405.18392, for 1 - sqrt.
    """

    def __init__(self, learning_rate, steps, warmup_steps=0, decay_steps=0, final=0.0, decay="linear"):
        super().__init__()
        if min(warmup_steps, decay_steps) < 0 or warmup_steps + decay_steps > steps:
            raise ValueError(
                f"warmup_steps={warmup_steps} and decay_steps={decay_steps} must not be negative, nor together more "
                f"than steps={steps}."
            )
        if decay not in ("linear", "cosine", "sqrt"):
            raise ValueError(f"decay must be 'linear', 'cosine' or 'sqrt', not {decay!r}.")
        if not 0 <= final <= 1:
            raise ValueError(f"final must lie between 0 and 1, not {final!r}.")
        self.learning_rate, self.steps, self.warmup_steps = learning_rate, steps, warmup_steps
        self.decay_steps, self.final, self.decay = decay_steps, final, decay

    def __call__(self, step):
        step = ops.cast(step, "float32")
        rising = ops.minimum(step / max(self.warmup_steps, 1), 1.0) if self.warmup_steps else 1.0
        if not self.decay_steps:
            return self.learning_rate * rising * ops.ones_like(step)
        done = ops.clip((step - (self.steps - self.decay_steps)) / self.decay_steps, 0.0, 1.0)
        if self.decay == "linear":
            left = 1.0 - done
        elif self.decay == "cosine":
            left = 0.5 * (1.0 + ops.cos(math.pi * done))
        else:
            left = 1.0 - ops.sqrt(done)
        return self.learning_rate * rising * (self.final + (1.0 - self.final) * left)

    def get_config(self):
        return {
            "learning_rate": self.learning_rate,
            "steps": self.steps,
            "warmup_steps": self.warmup_steps,
            "decay_steps": self.decay_steps,
            "final": self.final,
            "decay": self.decay,
        }
