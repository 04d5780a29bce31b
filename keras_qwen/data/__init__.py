"""From chats to the arrays that `fit` takes; imports no backend."""

from keras_qwen.data.chat import encode_chat
from keras_qwen.data.examples import next_token_arrays
from keras_qwen.data.reading import read_chats

__all__ = ["encode_chat", "next_token_arrays", "read_chats"]
