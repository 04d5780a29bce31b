"""The layers a Qwen is made of, each usable alone in a Keras model of one's own."""

from keras_qwen.layers.decoder_block import CheckpointedDecoderBlock, DecoderBlock
from keras_qwen.layers.grouped_query_attention import GroupedQueryAttention
from keras_qwen.layers.rms_norm import RMSNorm
from keras_qwen.layers.rotary_embedding import RotaryEmbedding, apply_rotary_embedding
from keras_qwen.layers.swiglu_mlp import SwiGLUMLP
from keras_qwen.layers.token_embedding import TokenEmbedding

__all__ = [
    "CheckpointedDecoderBlock",
    "DecoderBlock",
    "GroupedQueryAttention",
    "RMSNorm",
    "RotaryEmbedding",
    "SwiGLUMLP",
    "TokenEmbedding",
    "apply_rotary_embedding",
]
