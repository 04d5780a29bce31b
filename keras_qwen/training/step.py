"""One training or evaluation step: the batch's token sums, in micro-batches, and what `logs` report of them.

The backends differ only in how gradients are taken and variables updated; `step_jax.py`, `step_tensorflow.py` and
`step_torch.py` each do that behind the same two functions, `train_step` and `test_step`.
"""

import importlib

import keras
from keras import ops

from keras_qwen.keras_private import loss_tracker
from keras_qwen.ops.linear_cross_entropy import TokenLoss
from keras_qwen.ops.placement import batch_shards, placed
from keras_qwen.training.monitors import StepResult
from keras_qwen.training.token_weights import reciprocal, token_weights


class TokenStep:
    """The memory-saving training of a language model, held by the model between `compile` and `fit`.

    Args:
        token_loss: called with `(inputs, labels, weights, training=...)`, a batch's tensors; returns `TokenLoss`.
        micro_batch_size: rows of a micro-batch, or None for whole batches.
    """

    accuracy_name = "token_accuracy"
    own_inputs = ()  # names of inputs that the step takes and the model does not

    def __init__(self, token_loss, micro_batch_size=None):
        size = micro_batch_size
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise ValueError(f"micro_batch_size must be a positive integer, not {size!r}.")
        self.token_loss = token_loss
        self.micro_batch_size = size
        self.token_accuracy = keras.metrics.Mean(name=self.accuracy_name)
        self.gradient_norm = Latest(name="gradient_norm")
        self.loss_scale = Latest(name="loss_scale")
        self.backend = importlib.import_module(f"keras_qwen.training.step_{keras.backend.backend()}")
        self.monitors = []
        self._largest_batch = 0

    def watch(self, monitors):
        """Sets what the step reports besides; returns whether that is something else than before."""
        if [m.key for m in monitors] == [m.key for m in self.monitors]:
            return False
        self.monitors = list(monitors)
        return True

    def batch(self, model, data):
        """Inputs without the missing ones, labels and float32 weights of a batch as `fit` hands it over."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        if y is None:
            raise ValueError("fit and evaluate need labels: labels[b, t] is the token that follows position t.")
        inputs = {k: v for k, v in model.complete_inputs(x).items() if v is not None}
        return inputs, y, token_weights(inputs, y, sample_weight)

    def micro_batches(self, tensors, *, training):
        """Splits the tensors' rows; None where the batch is to be taken whole.

        A last, smaller batch is filled up with rows of weight 0.

        Args:
            tensors: `(inputs, labels, weights)`, each tensor with the same number of rows.

        Returns:
            The same structure, each tensor with two leading dimensions (micro-batches, micro_batch_size), or None.

        Raises:
            ValueError: if a batch is no multiple of the micro-batch and not smaller than the batches before it.
        """
        size, rows = self.micro_batch_size, tensors[1].shape[0]
        if size is None:
            return None
        if rows is not None:  # TensorFlow does not know it once batches of two sizes have come
            if training:
                if rows % size and rows >= self._largest_batch:
                    raise ValueError(f"micro_batch_size={size} does not divide the batch of {rows} rows.")
                self._largest_batch = max(rows, self._largest_batch)
            if rows <= size:
                return None
        if size % batch_shards():
            raise ValueError(
                f"micro_batch_size={size} is no multiple of the {batch_shards()} parts that a batch is split into."
            )
        count = (ops.shape(tensors[1])[0] + size - 1) // size

        def split(x):
            if rows is None or rows % size:
                filler = ops.zeros((size - 1, *x.shape[1:]), x.dtype)
                x = ops.concatenate([x, filler], axis=0)[: count * size]
            x = ops.reshape(x, (-1, size, *x.shape[1:]))
            return placed(x, "step", "batch", *["length"] * (len(x.shape) - 2))

        return keras.tree.map_structure(split, tensors)

    def loss_scale_of(self, optimizer):
        """What an optimizer wants the loss multiplied by, float32; 1 unless it scales losses."""
        return ops.cast(optimizer.scale_loss(1.0), "float32")

    def scaled(self, optimizer, batch, weight_sum=None):
        """A batch with its weights divided by their sum, or the one given, and multiplied by the loss scale.

        The sum of its losses is then what has to be differentiated: nothing of the gradients' size is multiplied
        afterwards, and in half precision the small numbers are large enough from the start.
        """
        inputs, labels, weights = batch
        weight_sum = ops.sum(weights) if weight_sum is None else weight_sum
        return inputs, labels, weights * (reciprocal(weight_sum) * self.loss_scale_of(optimizer))

    def unscaled(self, optimizer, sums: TokenLoss, weight_sum):
        """The sums of a batch from those of its `scaled` form."""
        factor = weight_sum / self.loss_scale_of(optimizer)
        return TokenLoss(sums.loss_sum * factor, sums.correct_sum * factor, weight_sum)

    @property
    def metrics(self):
        """What `logs` hold besides the loss."""
        return [self.token_accuracy, *self._of_training]

    @property
    def _of_training(self):
        return [self.gradient_norm, self.loss_scale, *(metric for m in self.monitors for metric in m.metrics)]

    def report(self, model, sums: TokenLoss, gradients=None, batch=None):
        """Adds a batch to the running means, weighted by its tokens, and returns `logs`.

        Args:
            gradients: in training, those of the loss times the optimizer's loss scale, before they are clipped. `logs`
                then have the `gradient_norm` of this step, its `loss_scale` if there is one that changes, and what the
                monitors report.
            batch: in training, the batch before it was `scaled`.
        """
        loss_tracker(model).update_state(sums.loss, sample_weight=sums.weight_sum)
        self.token_accuracy.update_state(sums.accuracy, sample_weight=sums.weight_sum)
        if gradients is None:
            unknown = {metric.name for metric in self._of_training}
        else:
            variables = [v.path for v in model.trainable_variables]
            squares = {
                path: self.backend.sum_of_squares(g)
                for path, g in zip(variables, gradients, strict=True)
                if g is not None
            }
            scale = self.loss_scale_of(model.optimizer)
            self.gradient_norm.update_state(ops.sqrt(sum(squares.values())) / scale)
            self.loss_scale.update_state(scale)
            if self.monitors:
                squares = {path: square / scale / scale for path, square in squares.items()}
                result = StepResult(batch[0], batch[2], squares, model.optimizer.learning_rate)
                for monitor in self.monitors:
                    monitor.update(result)
            unknown = set() if hasattr(model.optimizer, "dynamic_scale") else {self.loss_scale.name}
        return {name: value for name, value in model.get_metrics_result().items() if name not in unknown}


class Latest(keras.metrics.Metric):
    """The number given last."""

    def __init__(self, name, **kwargs):
        super().__init__(name=name, **kwargs)
        self.latest = self.add_variable((), initializer="zeros", name="latest", aggregation="mean")

    def update_state(self, value, sample_weight=None):
        self.latest.assign(value)

    def result(self):
        return self.latest.value


def add(a: TokenLoss, b: TokenLoss) -> TokenLoss:
    """The sums of two batches together."""
    return TokenLoss(*(x + y for x, y in zip(a, b, strict=True)))


def zero_sums() -> TokenLoss:
    """The sums of no batch."""
    return TokenLoss(*(ops.zeros((), "float32") for _ in range(3)))
