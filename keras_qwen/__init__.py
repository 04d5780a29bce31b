"""Qwen language models as native Keras 3: load, fine-tune with `fit`, generate, save for the rest of the world."""

from keras_qwen.config import QwenConfig
from keras_qwen.models.backbone import QwenBackbone
from keras_qwen.models.causal_lm import QwenCausalLM

__version__ = "0.1.0"
