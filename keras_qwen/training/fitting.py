"""What `QwenModel.fit` does about callbacks before Keras's `fit`: their order, their monitors, their say in the data.

A callback of this package may have, besides Keras's methods:

- `writes_logs = True`: it adds to `logs`, so it is called before the others, wherever it stands in the list;
- `saves_state = True`: it saves what the others leave, so it is called after them;
- `monitors(model)`: a list of `Monitor`, for the training step to report;
- `before_fit(model, arguments)`: returns the arguments of Keras's `fit`, a dict, as it wants them;
- `after_fit()`: called when `fit` is over, also by an exception.
"""

import contextlib
import inspect
import math

import keras


@contextlib.contextmanager
def prepared_fit(model, fit, *args, **kwargs):
    """Yields the arguments for Keras's `fit`, as a dict.

    Args:
        model: the model.
        fit: Keras's own `fit`, whose signature `args` and `kwargs` follow.
    """
    arguments = all_arguments(fit, *args, **kwargs)
    if isinstance(arguments["callbacks"], keras.callbacks.CallbackList):  # of someone who sees to all of it himself
        yield arguments
        return
    callbacks = sorted(keras.tree.flatten(arguments["callbacks"] or []), key=_rank)
    arguments["callbacks"] = callbacks
    _watch(model, callbacks)
    # The progress bar, which Keras puts last, has room for the totals only.
    history = [] if any(isinstance(c, keras.callbacks.History) for c in callbacks) else [keras.callbacks.History()]
    arguments["callbacks"] = [*callbacks, *history, _HideDetails()] if callbacks else None
    try:
        for callback in callbacks:
            if hasattr(callback, "before_fit"):
                arguments = callback.before_fit(model, arguments)
        yield arguments
    finally:
        for callback in callbacks:
            if hasattr(callback, "after_fit"):
                callback.after_fit()


def all_arguments(function, *args, **kwargs) -> dict:
    """What a function is called with, its defaults included, by name."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = dict(bound.arguments)
    return arguments | arguments.pop("kwargs", {})


def training_settings(model, arguments) -> dict:
    """What has to be the same in all processes that train one model, for them to wait for each other."""
    names = ("batch_size", "epochs", "initial_epoch", "steps_per_epoch", "validation_freq", "validation_steps")
    return {
        **{name: arguments[name] for name in names},
        "number of batches": getattr(arguments["x"], "num_batches", None),
        "validation": arguments["validation_data"] is not None,
        "dtype": model.dtype_policy.name,
        "trained weights": [len(model.trainable_variables), sum(math.prod(v.shape) for v in model.trainable_variables)],
        "optimizer": None if model.optimizer is None else keras.optimizers.serialize(model.optimizer)["config"],
        "micro_batch_size": getattr(getattr(model, "_step", None), "micro_batch_size", None),
        "remat": model.remat,
    }


def fit(model, *args, **kwargs):
    """`model.fit(...)` of any Keras model, with callbacks of this package; its own models need no such help.

    Args:
        model: a compiled Keras model.
        *args, **kwargs: of its `fit`.

    Returns:
        Keras's `History`.

    Example:
        >>> kq.training.fit(my_model, x, y, epochs=3, callbacks=[kq.callbacks.Checkpoint("run")])
    """
    with prepared_fit(model, model.fit, *args, **kwargs) as arguments:
        return model.fit(**arguments)


def _rank(callback):
    if getattr(callback, "writes_logs", False):
        return 0
    return 2 if getattr(callback, "saves_state", False) else 1


def _watch(model, callbacks):
    with_monitors = [c for c in callbacks if hasattr(c, "monitors")]
    monitors = [m for callback in with_monitors for m in callback.monitors(model)]
    step = getattr(model, "_step", None)
    if step is not None:
        if step.watch(monitors):
            model.train_function = None  # to be traced with them
    elif monitors:
        names = sorted({type(callback).__name__ for callback in with_monitors})
        raise ValueError(
            f"{', '.join(names)} needs the training step of the memory-saving loss: compile without a loss."
        )


class _HideDetails(keras.callbacks.Callback):
    """Takes what has a "/" in its name (`gradient_norm/layers_0`) out of `logs`, after all others have seen it."""

    def on_train_batch_end(self, batch, logs=None):
        self._hide(logs)

    def on_epoch_end(self, epoch, logs=None):
        self._hide(logs)

    def _hide(self, logs):
        for name in [name for name in logs or () if "/" in name]:
            del logs[name]
