"""LearningRate: the rate that each step was made with."""

import keras

from keras_qwen.training.monitors import Monitor
from keras_qwen.training.step import Latest


class LearningRate(keras.callbacks.Callback):
    """Writes `learning_rate` into `logs`, as the schedule or another callback has set it for the step.

    Raises:
        ValueError: in `fit`, for a model compiled with a Keras loss.

    Example:
        >>> model.fit(dataset, callbacks=[kq.callbacks.LearningRate()])
    """

    writes_logs = True

    def monitors(self, model):
        """What the step is to report; see `keras_qwen.training.fitting`."""
        return [_Rate([Latest(name="learning_rate")])]


class _Rate(Monitor):
    def update(self, result):
        self.metrics[0].update_state(result.learning_rate)
