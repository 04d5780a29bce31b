"""Which positions of a batch count, and by how much."""

import keras
from keras import ops

from keras_qwen.layers.documents import combine_segments


def token_weights(inputs, labels, sample_weight=None):
    """The weight of each position in the loss.

    Args:
        inputs: the model's inputs, a dict with `token_ids` (batch, length) and optional masks.
        labels: integers (batch, length), the token that follows each position; negative ones weigh 0.
        sample_weight: (batch, length), or (batch,) for whole rows; None: a position counts if the next one is real and
            in the same document.

    Returns:
        float32 tensor (batch, length).

    Raises:
        ValueError: if a shape does not fit.
    """
    shape = tuple(inputs["token_ids"].shape)
    if tuple(labels.shape) != shape:
        raise ValueError(
            f"labels have shape {tuple(labels.shape)}, token_ids {shape}: a label is needed for every position "
            f"(labels[b, t] is the token that follows position t)."
        )
    if sample_weight is None:
        segments = combine_segments(inputs.get("padding_mask"), inputs.get("segment_ids"))
        weights = ops.ones(ops.shape(labels), "float32") if segments is None else _continues(segments)
    else:
        weights = ops.cast(sample_weight, "float32")
        if len(weights.shape) == 1:
            weights = ops.broadcast_to(weights[:, None], ops.shape(labels))
        if tuple(weights.shape) != shape:
            raise ValueError(f"The loss weights have shape {tuple(weights.shape)}, token_ids {shape}.")
    return ops.where(labels < 0, ops.zeros_like(weights), weights)


def _continues(segments):
    """1 where the next position is in the same document. Of the last position nothing says it is not."""
    following = ops.concatenate([segments[:, 1:], segments[:, -1:]], axis=1)
    return ops.cast(ops.logical_and(segments > 0, segments == following), "float32")


def reciprocal(total):
    """1 / total, and 0 for 0: a batch without a trained token has loss 0 and no gradient."""
    return ops.where(total > 0, 1.0 / ops.maximum(total, keras.backend.epsilon()), ops.zeros_like(total))
