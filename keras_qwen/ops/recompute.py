"""Functions whose backward passes keep less than automatic differentiation would, and compute the rest again."""

import importlib

import keras

_BACKEND = importlib.import_module(f"keras_qwen.ops.recompute_{keras.backend.backend()}")


def lean(function):
    """A function of tensors from one that returns its value and its backward pass, which keeps what that refers to."""
    return _BACKEND.lean(function)


def after(slopes, *tensors):
    """The tensors, in a form from which nothing is computed before `slopes` are there.

    Without that, a compiler takes what a backward pass computes again for what the forward pass has computed, and
    keeps it; and TensorFlow computes it as soon as it can, which is in the forward pass, too.
    """
    return _BACKEND.after(slopes, *tensors)


def together(*tensors):
    """The tensors, in a form from which nothing is computed before all of them are there, where that costs nothing."""
    return _BACKEND.together(*tensors)


def no_gradients(*tensors):
    """What a backward pass returns for tensors of which it has no gradients, because others have them."""
    return _BACKEND.no_gradients(*tensors)


def add_product(y, left, right):
    """`y + left @ right`, for which the backward pass is to keep neither y nor the product."""
    return _BACKEND.add_product(y, left, right)
