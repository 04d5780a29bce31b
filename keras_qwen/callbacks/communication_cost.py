"""CommunicationCost: what a training step sends between devices."""

import importlib
import tempfile

import keras

from keras_qwen.training.monitors import Monitor


class CommunicationCost(keras.callbacks.Callback):
    """Writes into `logs` what the devices of a mesh send each other in a step.

    - `communication_bytes`, and `communication_bytes/<axis>` for each mesh axis (in `History` and loggers, not in the
      progress bar): bytes that each device receives in a step, read from the compiled program: gathering N bytes from k
      devices counts N (k - 1) / k, reducing them to one copy each twice that. What is in loops whose length is only
      known at run time counts once.
    - `communication_share`: the share of the devices' busy time that such operations took in one step of the
      epoch, from JAX's profiler, where that tells them from others; they may overlap with arithmetic.

    On JAX under a distribution. The step is compiled a second time for it, and one step of each epoch is profiled.

    Args:
        profile: whether to measure `communication_share`.

    Raises:
        ValueError: in `fit`, on another backend, or without a distribution.

    Example:
        >>> history = model.fit(dataset, callbacks=[kq.callbacks.CommunicationCost()])
        >>> history.history["communication_bytes"]
    """

    writes_logs = True

    def __init__(self, profile=True):
        super().__init__()
        self.profile = profile
        self._bytes = None

    def monitors(self, model):
        """What the step is to report; see `keras_qwen.training.fitting`."""
        if keras.backend.backend() != "jax" or keras.distribution.distribution() is None:
            raise ValueError(
                "CommunicationCost reads the program that JAX compiles for a mesh: it needs the JAX backend and a "
                "distribution (kq.distribution.model_parallel)."
            )
        self._shapes = _Shapes([])
        return [self._shapes]

    @property
    def collectives(self):
        """The `keras_qwen.collectives.Collective`s of the step, once it has run."""
        return self._collectives

    def on_epoch_begin(self, epoch, logs=None):
        self._share = None

    def on_train_batch_begin(self, batch, logs=None):
        self._folder = None
        if self.profile and batch == 1:  # the first is compiled
            self._folder = tempfile.TemporaryDirectory()
            self._backend().start(self._folder.name)

    def on_train_batch_end(self, batch, logs=None):
        if self._folder is not None:
            self._share = self._backend().communication_share(self._folder.name, logs)
            self._folder.cleanup()

    def on_epoch_end(self, epoch, logs=None):
        if self._bytes is None:
            self._collectives, self._bytes = self._backend().collectives(self._model, self._shapes)
        logs["communication_bytes"] = sum(self._bytes.values())
        logs |= {f"communication_bytes/{axis}": size for axis, size in self._bytes.items()}
        if self._share is not None:
            logs["communication_share"] = self._share

    def _backend(self):
        return importlib.import_module("keras_qwen.callbacks.communication_jax")


class _Shapes(Monitor):
    """Remembers the shapes of the batch that a step was traced with."""

    inputs = rows = None

    def update(self, result):
        self.inputs = {name: (tuple(x.shape), str(x.dtype)) for name, x in result.inputs.items()}
        self.rows = tuple(result.weights.shape)
