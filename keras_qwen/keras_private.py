"""All that this package uses of Keras's private API, in one place; `tests/test_keras_private.py` watches it."""

import contextlib

import keras
from keras.src.backend.common import global_state

_UNINITIALIZED = "uninitialized_variables"  # where Keras keeps the variables created in a stateless scope


@contextlib.contextmanager
def deferred_initialization():
    """Variables created inside hold no memory until the end, and are initialised there, one by one.

    Keras itself does so for variables that are created in a `StatelessScope`. Should the body raise, they are
    dropped instead of being initialised.
    """
    with keras.StatelessScope():
        try:
            yield
        except BaseException:
            global_state.set_global_attribute(_UNINITIALIZED, [])
            raise


def set_initializer(variable, initializer):
    """Replaces the initialiser of a variable whose initialisation is deferred: `initializer(shape, dtype)`."""
    if variable._value is not None:
        raise RuntimeError(f"{variable.path} is initialised already; Keras no longer defers it.")
    variable._initializer = initializer


def loss_tracker(model):
    """The running mean that `fit` and `evaluate` report as "loss"."""
    return model._loss_tracker
