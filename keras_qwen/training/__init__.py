"""What `compile` and `fit` train with."""

from keras_qwen.training.adamw import AdamW
from keras_qwen.training.fitting import fit
from keras_qwen.training.preference import DPO
from keras_qwen.training.schedules import WarmupStableDecay

__all__ = ["DPO", "AdamW", "WarmupStableDecay", "fit"]
