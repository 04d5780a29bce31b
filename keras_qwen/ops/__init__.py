"""The two kernels: attention, and the head with its cross-entropy."""

from keras_qwen.ops.attention import attention
from keras_qwen.ops.linear_cross_entropy import TokenLoss, linear_cross_entropy

__all__ = ["TokenLoss", "attention", "linear_cross_entropy"]
