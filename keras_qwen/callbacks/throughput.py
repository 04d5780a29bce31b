"""Throughput: tokens a second, and how much of the device that is."""

import math
import time

import keras
from keras import ops

from keras_qwen import devices
from keras_qwen.compute_estimate import flops_per_token
from keras_qwen.layers.documents import combine_segments
from keras_qwen.training.monitors import Monitor
from keras_qwen.training.step import Latest


class Throughput(keras.callbacks.Callback):
    """Writes the speed of training into `logs`.

    - `tokens_per_second`: real tokens, padding not counted.
    - `trained_tokens_per_second`: those with a weight in the loss.
    - `model_flops_utilization`: `tokens_per_second x flops_per_token / peak_flops`, where
      `keras_qwen.compute_estimate.flops_per_token` counts 6 operations for each weight of a matrix (4 where the base is
      frozen) and causal attention over the rows' length (in packed rows an upper limit); only where the peak is known.

    In a step's `logs` it is the step's own speed, in an epoch's the mean over its steps, without the first of `fit`,
    which is compiled. A step is timed with its data, and without callbacks and validation.

    Args:
        peak_flops: operations a second that all devices together can do. Default: from a table of data sheets, for
            known GPUs and TPUs and 16-bit models; otherwise there is no `model_flops_utilization`.

    Raises:
        ValueError: in `fit`, for a model compiled with a Keras loss.

    Example:
        >>> history = model.fit(dataset, callbacks=[kq.callbacks.Throughput(peak_flops=312e12)])
        >>> history.history["tokens_per_second"]
        [21034.5]

    Reference: Chowdhery et al., 2022, "PaLM", arXiv:2204.02311, section 4.1, for the utilisation.
    """

    writes_logs = True

    def __init__(self, peak_flops=None):
        super().__init__()
        if peak_flops is not None and not peak_flops > 0:
            raise ValueError(f"peak_flops must be positive, not {peak_flops!r}.")
        self.peak_flops = peak_flops

    def monitors(self, model):
        """What the step is to report; see `keras_qwen.training.fitting`."""
        return [_TokenCounts([keras.metrics.Sum(name=n) for n in _COUNTS] + [Latest(name=_LENGTH)])]

    def on_train_begin(self, logs=None):
        model = self._model
        self._peak = self.peak_flops or devices.peak_flops(model.dtype_policy.compute_dtype)
        adapters = [v for v in model.trainable_variables if "lora" in v.path]
        trained = [v for v in model.trainable_variables if "lora" not in v.path and _is_matrix(v, model.config)]
        self._weights = dict(
            trained_weights=sum(math.prod(v.shape) for v in trained),
            adapter_weights=sum(math.prod(v.shape) for v in adapters if len(v.shape) == 2),
        )
        self._compiling = True

    def on_epoch_begin(self, epoch, logs=None):
        self._before, self._seconds, self._counted, self._length = None, 0.0, [0.0, 0.0], 0.0

    def on_train_batch_begin(self, batch, logs=None):
        self._began = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        seconds = time.perf_counter() - self._began
        totals, length = [logs.pop(name) for name in _COUNTS], logs.pop(_LENGTH)
        if self._before is None and batch < self._model.steps_per_execution:
            self._before = [0.0, 0.0]
        if self._before is not None:  # it is in an epoch that was resumed in its middle
            counts = [total - before for total, before in zip(totals, self._before, strict=True)]
            logs |= self._rates(counts, seconds, length)
            if not self._compiling:
                self._counted = [a + b for a, b in zip(self._counted, counts, strict=True)]
                self._seconds += seconds
                self._length = length
            self._latest = counts, seconds, length
        self._before, self._compiling = totals, False

    def on_epoch_end(self, epoch, logs=None):
        for name in (*_COUNTS, _LENGTH):
            logs.pop(name, None)
        if self._seconds:
            logs |= self._rates(self._counted, self._seconds, self._length)
        elif self._before is not None:  # the first step was all there was
            logs |= self._rates(*self._latest)

    def _rates(self, counts, seconds, length):
        rates = {f"{name}_per_second": count / seconds for name, count in zip(_COUNTS, counts, strict=True)}
        if self._peak is not None:
            flops = flops_per_token(self._model.config, round(length), **self._weights)
            rates["model_flops_utilization"] = rates["tokens_per_second"] * flops / self._peak
        return rates


_COUNTS, _LENGTH = ("tokens", "trained_tokens"), "row_length"


class _TokenCounts(Monitor):
    def update(self, result):
        segments = combine_segments(result.inputs.get("padding_mask"), result.inputs.get("segment_ids"))
        real = ops.ones_like(result.inputs["token_ids"]) if segments is None else segments > 0
        self.metrics[0].update_state(ops.cast(real, "float32"))
        self.metrics[1].update_state(ops.cast(result.weights > 0, "float32"))
        self.metrics[2].update_state(ops.cast(ops.shape(result.weights)[1], "float32"))


def _is_matrix(variable, config):
    """Whether tokens are multiplied with it; embeddings are where they are the head, too."""
    return len(variable.shape) == 2 and ("embed_tokens" not in variable.path or config.tie_word_embeddings)
