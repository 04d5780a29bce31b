"""How `fit` takes up an epoch in its middle: the batches that were trained on pass without a step and unseen."""

import keras


class SkippingStep:
    """Takes the place of a model's train function for the first calls of a resumed `fit`.

    Args:
        model: the model, whose `train_function` is replaced until the steps are skipped.
        steps: how many steps to skip.
        consume: how many batches to take from the data at the first call; 0 where the data begins at the right place.
        logs: returned by skipped steps.
    """

    def __init__(self, model, steps, consume, logs):
        self.model, self.steps, self.consume, self.logs = model, steps, consume, logs
        self.train_function = model.train_function
        model.train_function = self

    def __call__(self, *args):
        """As of Keras's train functions: `(state, iterator)` on JAX, `(iterator)` elsewhere."""
        self._consume(args[-1])
        if self.steps <= 0:
            self.model.train_function = self.train_function
            return self.train_function(*args)
        self.steps -= self.model.steps_per_execution
        if self.steps <= 0:
            self.model.train_function = self.train_function
        return (self.logs, args[0]) if len(args) == 2 else self.logs

    def _consume(self, iterator):
        if keras.backend.backend() == "torch":  # there Keras has taken the batch itself
            return
        while self.consume > 0:
            try:
                next(iterator)
            except StopIteration:
                raise ValueError(
                    f"The data ended {self.consume} batches before the place where the checkpoint was made: it is not "
                    f"the data of then."
                ) from None
            self.consume -= 1


class ContinuedCallbacks(keras.callbacks.CallbackList):
    """Keras's list of callbacks, which hears nothing of the skipped batches.

    Args:
        callbacks: the callbacks.
        skipped: batches to keep quiet about in the first epoch.
        **kwargs: of `CallbackList`.
    """

    def __init__(self, callbacks, skipped, **kwargs):
        super().__init__(callbacks, **kwargs)
        self.skipped = skipped

    def on_train_batch_begin(self, batch, logs=None):
        if batch >= self.skipped:
            super().on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch, logs=None):
        if batch >= self.skipped:
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch, logs=None):
        self.skipped = 0
        super().on_epoch_end(epoch, logs)


class ContinuedHistory(keras.callbacks.History):
    """Keras's `History`, which begins with the epochs of the interrupted run.

    Args:
        epochs: their numbers.
        history: {name: a value for each}.
    """

    def __init__(self, epochs, history):
        super().__init__()
        self._epochs, self.history = list(epochs), {name: list(values) for name, values in history.items()}

    def on_train_begin(self, logs=None):
        self.epoch = list(self._epochs)
