"""Qwen language models as native Keras 3: load, fine-tune with `fit`, generate, save for the rest of the world."""

from keras_qwen._backend_check import require_backend

require_backend()  # before the first `import keras`, whose own message does not say the remedy

from keras_qwen import data, layers, ops, training  # noqa: E402
from keras_qwen.config import QwenConfig  # noqa: E402
from keras_qwen.models.backbone import QwenBackbone  # noqa: E402
from keras_qwen.models.causal_lm import QwenCausalLM  # noqa: E402
from keras_qwen.tokenizer import QwenTokenizer  # noqa: E402

__all__ = ["QwenBackbone", "QwenCausalLM", "QwenConfig", "QwenTokenizer", "data", "layers", "ops", "training"]
__version__ = "0.1.0"
