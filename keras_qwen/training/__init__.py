"""What `compile` and `fit` train with."""

from keras_qwen.training.adamw import AdamW
from keras_qwen.training.fitting import fit

__all__ = ["AdamW", "fit"]
