"""From chats and texts to the batches that `fit` takes; imports no backend."""

from keras_qwen.data.chat import encode_chat
from keras_qwen.data.dataset import ChatDataset, PreferenceDataset
from keras_qwen.data.examples import next_token_arrays
from keras_qwen.data.packing import pack
from keras_qwen.data.reading import read_chats
from keras_qwen.data.viewer import show_tokens

__all__ = [
    "ChatDataset",
    "PreferenceDataset",
    "encode_chat",
    "next_token_arrays",
    "pack",
    "read_chats",
    "show_tokens",
]
