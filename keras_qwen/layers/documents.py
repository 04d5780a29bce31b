"""What a batch's optional inputs say about its tokens: which document, and where in it."""

import keras
from keras import ops

from keras_qwen.ops.placement import on_dtensor


@keras.saving.register_keras_serializable(package="keras_qwen")
class Documents(keras.layers.Layer):
    """Combines `padding_mask`, `segment_ids` and `position_ids` to one segment and one position a token.

    `padding_mask` and `segment_ids` combine by AND. Positions default to the index inside the document, so that left
    padding, right padding and no padding give one document the same positions.

    Call arguments:
        token_ids: integer tensor (batch, length).
        padding_mask: optional (batch, length), 1 = real token.
        segment_ids: optional integers (batch, length), documents numbered from 1, 0 = padding.
        position_ids: optional integers (batch or 1, length).

    Returns:
        `(segment_ids, position_ids)`: int32 (batch, length), or (batch, 0) where neither mask was given and all tokens
        of a row are one document; int32 (batch or 1, length).
    """

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True

    def call(self, token_ids, padding_mask=None, segment_ids=None, position_ids=None):
        segments = combine_segments(padding_mask, segment_ids)
        if position_ids is not None:
            positions = ops.cast(position_ids, "int32")
        else:
            positions = document_positions(segments, token_ids)
        return ops.zeros_like(token_ids, dtype="int32")[:, :0] if segments is None else segments, positions

    def compute_mask(self, *args, **kwargs):
        return None

    def compute_output_spec(self, token_ids, padding_mask=None, segment_ids=None, position_ids=None):
        return (
            keras.KerasTensor((token_ids.shape[0], None), "int32"),
            keras.KerasTensor((None, token_ids.shape[1]), "int32"),
        )


def combine_segments(padding_mask, segment_ids):
    """Segments with padding as 0: int32 (batch, length), or None where both are None."""
    if segment_ids is None:
        return None if padding_mask is None else ops.cast(ops.cast(padding_mask, "bool"), "int32")
    segment_ids = ops.cast(segment_ids, "int32")
    if padding_mask is None:
        return segment_ids
    return ops.where(ops.cast(padding_mask, "bool"), segment_ids, ops.zeros_like(segment_ids))


def document_positions(segment_ids, token_ids):
    """Index of each token in its run of equal segments: int32 (batch, length), (1, length) without segments."""
    length = ops.shape(token_ids)[1]
    index = ops.arange(length, dtype="int32")
    if segment_ids is None:
        return index[None]
    starts = ops.concatenate(
        [ops.ones_like(segment_ids[:, :1], dtype="bool"), segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1
    )
    if on_dtensor():  # which cannot search: of each token, how many are in runs before its own
        runs = ops.cumsum(ops.cast(starts, "int32"), axis=1)
        before = ops.sum(ops.cast(ops.expand_dims(runs, 1) < ops.expand_dims(runs, 2), "int32"), axis=-1)
        return index[None] - before
    runs = ops.reshape(ops.cumsum(ops.cast(ops.reshape(starts, (-1,)), "int32")), (-1,))  # ascending over all rows
    first = ops.searchsorted(runs, runs, side="left")  # flat index of each run's first token
    flat = ops.arange(ops.shape(runs)[0], dtype="int32")
    return ops.reshape(flat - ops.cast(first, "int32"), ops.shape(segment_ids))


def given(tensor):
    """The tensor, or None where it is None or, having a dimension of size 0, stands for "not given".

    A functional graph cannot pass None from layer to layer; an empty tensor does.
    """
    return None if tensor is None or 0 in tuple(tensor.shape) else tensor
