"""What `compile` and `fit` train with."""

from keras_qwen.training.adamw import AdamW

__all__ = ["AdamW"]
