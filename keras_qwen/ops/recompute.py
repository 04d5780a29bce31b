"""Functions whose backward passes keep less than automatic differentiation would, and compute the rest again."""

import importlib

import keras
from keras import ops


def lean(function):
    """A function of tensors from one that returns its value and its backward pass, which keeps what that refers to."""
    if keras.backend.backend() == "torch":  # whose own gradients keep about as little
        return lambda *tensors: function(*tensors)[0]
    return ops.custom_gradient(function)


def after(slopes, *tensors):
    """The tensors, in a form from which nothing is computed before `slopes` are there.

    Without that, a compiler takes what a backward pass computes again for what the forward pass has computed, and
    keeps it; and TensorFlow computes it as soon as it can, which is in the forward pass, too.
    """
    return tensors if keras.backend.backend() == "torch" else _backend().after(slopes, *tensors)


def no_gradients(*tensors):
    """What a backward pass returns for tensors of which it has no gradients, because others have them."""
    return (None,) * len(tensors) if keras.backend.backend() == "torch" else _backend().no_gradients(*tensors)


def _backend():
    return importlib.import_module(f"keras_qwen.ops.recompute_{keras.backend.backend()}")
