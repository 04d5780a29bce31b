"""Text to token ids and back, and chats to text; imports no backend."""

from keras_qwen.tokenizer.stream import StreamDecoder
from keras_qwen.tokenizer.tokenizer import QwenTokenizer

__all__ = ["QwenTokenizer", "StreamDecoder"]
