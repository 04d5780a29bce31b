"""GradientNorm: how large the gradient is, and in which block."""

import re

import keras
from keras import ops

from keras_qwen.training.monitors import Monitor
from keras_qwen.training.step import Latest

_BLOCK = re.compile(r"(?:^|/)(layers_\d+|embed_tokens|norm|lm_head)(?=/|$)")


class GradientNorm(keras.callbacks.Callback):
    """Writes the gradient's norm in each block into `logs`: `gradient_norm/layers_0`, `gradient_norm/embed_tokens`, ...

    The norm over all, `gradient_norm`, is there without it. Both are Euclidean, of the gradient before it is clipped,
    and of the latest step. They are computed in the step, from the gradients that it has. The progress bar does not
    show the blocks.

    Raises:
        ValueError: in `fit`, for a model compiled with a Keras loss.

    Example:
        >>> history = model.fit(dataset, callbacks=[kq.callbacks.GradientNorm()])
        >>> history.history["gradient_norm/layers_0"]
        [0.83]
    """

    writes_logs = True

    def monitors(self, model):
        """What the step is to report; see `keras_qwen.training.fitting`."""
        return [_BlockNorms(tuple(dict.fromkeys(block_of(v.path) for v in model.trainable_variables)))]


def block_of(path) -> str:
    """The block that a variable's path lies in: `"layers_3"`, `"embed_tokens"`, `"norm"`, `"lm_head"` or `"other"`."""
    found = _BLOCK.search(path)
    return found[1] if found else "other"


class _BlockNorms(Monitor):
    def __init__(self, blocks):
        self.blocks = blocks
        super().__init__([Latest(name=f"gradient_norm/{block}") for block in blocks], key=blocks)

    def update(self, result):
        sums = dict.fromkeys(self.blocks, 0.0)
        for path, square in result.squares.items():
            sums[block_of(path)] += square
        for metric, block in zip(self.metrics, self.blocks, strict=True):
            metric.update_state(ops.sqrt(ops.cast(sums[block], "float32")))
