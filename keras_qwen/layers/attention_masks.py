"""The attention masks of a forward pass, made once for all its layers."""

import keras
from keras import ops

from keras_qwen.layers.documents import given
from keras_qwen.ops.attention import choose_implementation
from keras_qwen.ops.attention_mask import attention_mask


@keras.saving.register_keras_serializable(package="keras_qwen")
class AttentionMasks(keras.layers.Layer):
    """Makes the masks that dense attention needs; the other implementations work from `segment_ids`.

    Args:
        windows: the sliding window of each mask, None for full attention.
        implementation: of `keras_qwen.ops.attention`.
        dropout: the layers' attention dropout; the choice of implementation depends on it.

    Call arguments:
        hidden: tensor (batch, length, hidden_size).
        segment_ids: integers (batch, length), or (batch, 0) for "none given".

    Returns:
        A tuple, for each window a boolean tensor (batch or 1, length, length), or an empty one where dense attention
        is not used.
    """

    def __init__(self, windows, implementation="auto", dropout=0.0, **kwargs):
        super().__init__(**kwargs)
        self.windows = tuple(windows)
        self.implementation = implementation
        self.dropout = dropout

    def call(self, hidden, segment_ids, training=None):
        length = hidden.shape[1]
        chosen = choose_implementation(
            implementation=self.implementation,
            length=length,
            key_length=length,
            dtype=keras.backend.standardize_dtype(hidden.dtype),
            dropout=self.dropout if training else 0.0,
        )
        if chosen != "dense":
            return tuple(ops.zeros((0, 0, 0), dtype="bool") for _ in self.windows)
        return tuple(attention_mask(given(segment_ids), ops.shape(hidden)[1], window) for window in self.windows)

    def compute_output_spec(self, hidden, segment_ids, training=None):
        length = hidden.shape[1]
        return tuple(keras.KerasTensor((None, length, length), dtype="bool") for _ in self.windows)

    def get_config(self):
        return {
            **super().get_config(),
            "windows": self.windows,
            "implementation": self.implementation,
            "dropout": self.dropout,
        }
