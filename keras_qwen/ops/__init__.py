"""The kernels: attention, and the head with its cross-entropy or log-probabilities."""

from keras_qwen.ops.attention import attention
from keras_qwen.ops.linear_cross_entropy import TokenLoss, linear_cross_entropy
from keras_qwen.ops.token_log_probs import token_log_probs

__all__ = ["TokenLoss", "attention", "linear_cross_entropy", "token_log_probs"]
