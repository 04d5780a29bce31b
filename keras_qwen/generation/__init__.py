"""Text from a trained model: prompts, the key/value cache, the choice of tokens, and when to stop."""

from keras_qwen.generation.companions import read_generation_config, read_tokenizer
from keras_qwen.generation.generator import Generator

__all__ = ["Generator", "read_generation_config", "read_tokenizer"]
