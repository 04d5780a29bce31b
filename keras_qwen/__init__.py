"""Qwen language models as native Keras 3: load, fine-tune with `fit`, generate, save for the rest of the world."""

from keras_qwen import _late_import
from keras_qwen._backend_check import require_backend

if _late_import.is_wanted():
    __getattr__ = _late_import.importer(__name__)
else:
    require_backend()  # before the first `import keras`, whose own message does not say the remedy

    from keras_qwen import callbacks, data, distribution, layers, ops, training
    from keras_qwen.config import QwenConfig
    from keras_qwen.models.backbone import QwenBackbone
    from keras_qwen.models.causal_lm import QwenCausalLM
    from keras_qwen.planner import MemoryPlan, find_batch_size, plan, suggest
    from keras_qwen.tokenizer import QwenTokenizer

__all__ = [
    "MemoryPlan",
    "QwenBackbone",
    "QwenCausalLM",
    "QwenConfig",
    "QwenTokenizer",
    "callbacks",
    "data",
    "distribution",
    "find_batch_size",
    "layers",
    "ops",
    "plan",
    "suggest",
    "training",
]
__version__ = "0.1.0"
