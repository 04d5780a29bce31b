"""ActivationStatistics: how large the hidden states are, block by block, and where the first NaN is."""

import math
import warnings

import keras
from keras import ops

from keras_qwen.callbacks.data_order import are_arrays
from keras_qwen.layers.documents import combine_segments

_STATISTICS = ("rms", "max", "saturated")
_SATURATED = 4.6  # sigmoid(4.6) = 0.99


class ActivationStatistics(keras.callbacks.Callback):
    """Writes statistics of each block into `logs`, measured now and then on a few rows, always the same.

    - `activation_rms/layers_0`: root mean square of what the block gives out (the residual stream).
    - `activation_max/layers_0`: its largest magnitude.
    - `activation_saturated/layers_0`: the share of the MLP's gates that are as good as open or closed:
      sigmoid(gate_proj(x)) under 0.01 or over 0.99, where its slope is gone.

    Of real tokens, with the weights before the step and without dropout; training does not notice. The first layer that
    gives out a NaN or an infinity on these rows is named in a warning, with the step. A loss that is not finite has
    made all weights NaN by the time it is seen: then the layer with the largest number before is named.
    The progress bar does not show the blocks.

    Args:
        probe: the model's inputs for some rows, a dict or token ids. Default: the first two rows of the data, where
            that is arrays, a `PyDataset` or a `kq.data.ChatDataset`.
        every: steps from one measurement to the next, beginning with the first.

    Raises:
        ValueError: in `fit`, where the data does not say what to measure on; for a bad `every`.

    Example:
        >>> history = model.fit(dataset, callbacks=[kq.callbacks.ActivationStatistics(every=50)])
        >>> history.history["activation_rms/layers_0"]
        [1.31]

    Reference: Karpathy et al., 2015, arXiv:1506.02078, section 4.2, for gates that are saturated.
    """

    writes_logs = True

    def __init__(self, probe=None, every=100):
        super().__init__()
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ValueError(f"every must be a positive number of steps, not {every!r}.")
        self.probe, self.every = probe, every
        self._step, self._warned = 0, False

    def before_fit(self, model, arguments):
        """Looks at the data; see `keras_qwen.training.fitting`."""
        if self.probe is None:
            self.probe = _first_rows(arguments["x"])
        return arguments

    def on_train_batch_begin(self, batch, logs=None):
        if self._step % self.every < self._model.steps_per_execution:
            self._measure()

    def on_train_batch_end(self, batch, logs=None):
        self._step += self._model.steps_per_execution
        logs.update(self._latest)
        if not self._warned and not math.isfinite(logs.get("loss", 0.0)):
            largest, value = max(self._maxima.items(), key=lambda item: item[1])
            self._warn(
                f"The loss is not finite in step {self._step}. On the probe's rows all was finite before step "
                f"{self._measured + 1}, the largest number {value:.3g}, in {largest}. With every=1 the step is found "
                f"in which that ends; if it is this one, look at its batch."
            )

    def on_epoch_end(self, epoch, logs=None):
        logs.update(self._latest)

    def _measure(self):
        found = block_statistics(self.model, self.probe)
        self._latest = {
            f"activation_{name}/{block}": values[name]
            for block, values in found.items()
            for name in _STATISTICS
            if block.startswith("layers_") and name in values
        }
        self._maxima, self._measured = {block: values["max"] for block, values in found.items()}, self._step
        bad = next((block for block, value in self._maxima.items() if not math.isfinite(value)), None)
        if bad is not None and not self._warned:
            self._warn(f"Before step {self._step + 1}, {bad} is the first layer to give out NaN or infinity.")

    def _warn(self, text):
        self._warned = True
        warnings.warn(text, stacklevel=2)


def block_statistics(model, inputs):
    """RMS, maximum and saturation after each layer: {layer name: {"rms", "max", "saturated"}}, in order.

    Args:
        model: `QwenCausalLM` or `QwenBackbone`.
        inputs: as of the model.
    """
    backbone = getattr(model, "backbone", model)
    inputs = backbone.complete_inputs(inputs)
    inputs = {name: None if value is None else ops.convert_to_tensor(value) for name, value in inputs.items()}
    segments = combine_segments(inputs["padding_mask"], inputs["segment_ids"])
    real = ops.ones_like(inputs["token_ids"]) if segments is None else segments > 0
    real = ops.cast(real, "float32")[..., None]

    hidden = backbone.embed_tokens(inputs["token_ids"])
    segment_ids, position_ids = backbone.documents(**inputs)
    rope = backbone.rotary_emb(position_ids)
    windows = dict.fromkeys(block.config.window(block.layer_index) for block in backbone.blocks)
    masks = dict(zip(windows, backbone.attention_masks(hidden, segment_ids), strict=True))
    found = {"embed_tokens": _statistics(hidden, real)}
    for block in backbone.blocks:  # as DecoderBlock.call has it
        given = dict(segment_ids=segment_ids, attention_mask=masks[block.config.window(block.layer_index)])
        hidden = hidden + block.self_attn(block.input_layernorm(hidden), rope=rope, training=False, **given)
        normed = block.post_attention_layernorm(hidden)
        hidden = hidden + block.mlp(normed)
        gate = ops.cast(block.mlp.gate_proj(normed), "float32")
        found[block.name] = _statistics(hidden, real) | {
            "saturated": _mean(ops.cast(ops.abs(gate) > _SATURATED, "float32"), real)
        }
    found["norm"] = _statistics(backbone.norm(hidden), real)
    return {name: {key: float(ops.convert_to_numpy(x)) for key, x in values.items()} for name, values in found.items()}


def _statistics(hidden, real):
    hidden = ops.cast(hidden, "float32")
    return {"rms": ops.sqrt(_mean(ops.square(hidden), real)), "max": ops.max(ops.abs(hidden) * real)}


def _mean(x, real):
    return ops.sum(x * real) / ops.maximum(ops.sum(real) * x.shape[-1], 1.0)


def _first_rows(x, rows=2):
    if isinstance(x, keras.utils.PyDataset):
        x = x[0][0]
    elif hasattr(x, "start_at"):  # kq.data.ChatDataset
        batches = iter(x)
        x = next(batches)[0]
        batches.close()
    if not are_arrays(x):
        raise ValueError(
            f"ActivationStatistics cannot look into a {type(x).__name__} without taking a batch from it: pass probe=, "
            f"the model's inputs for some rows."
        )
    return keras.tree.map_structure(lambda a: a[:rows], x)
