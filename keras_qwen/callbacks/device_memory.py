"""DeviceMemory: how much of it is in use."""

import keras

from keras_qwen import devices


class DeviceMemory(keras.callbacks.Callback):
    """Writes the memory of the accelerator into `logs`, in GB (1e9 bytes); on a CPU that of the process.

    - `memory_in_use_gb`: after the step; on a CPU what is resident.
    - `memory_peak_gb`: the most there was since the program began.
    - `memory_limit_gb`: what there is; on a CPU the machine's memory, or the container's if that is less.

    What the backend cannot say is left out. On TensorFlow the limit is the card's memory, as `nvidia-smi` says it.

    Example:
        >>> history = model.fit(dataset, callbacks=[kq.callbacks.DeviceMemory()])
        >>> max(history.history["memory_peak_gb"])
        7.2
    """

    writes_logs = True

    def on_train_batch_end(self, batch, logs=None):
        self._write(logs)

    def on_epoch_end(self, epoch, logs=None):
        self._write(logs)

    def _write(self, logs):
        for name, value in devices.memory()._asdict().items():
            if value is not None:
                logs[f"memory_{name}_gb"] = value / 1e9
