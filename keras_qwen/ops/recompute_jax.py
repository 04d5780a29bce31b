"""What `recompute` needs of JAX, most of it on a CPU, where XLA drops optimization barriers before they matter."""

import jax
import jax.numpy as jnp
import keras
from keras import ops

lean = ops.custom_gradient


def after(slopes, *tensors):
    if not _on_one_cpu():
        return tensors
    zero = 0 * slopes.ravel()[0]  # for all that XLA knows it may be NaN
    return tuple(tensor + zero.astype(tensor.dtype) for tensor in tensors)


def together(*tensors):
    return jax.lax.optimization_barrier(tensors)


def no_gradients(*tensors):
    return tuple(jnp.zeros_like(tensor) for tensor in tensors)


def add_product(y, left, right):
    """`y + left @ right`, in the memory of y.

    XLA would keep y and the product for the backward pass, to add them there again. It does not see through a loop.
    """
    if not _on_one_cpu():
        return y + left @ right
    steps = jnp.where(jnp.isnan(left[0, 0]), 2, 1)  # for all that XLA knows
    return jax.lax.while_loop(lambda s: s[0] < steps, lambda s: (s[0] + 1, s[1] + left @ right), (0, y))[1]


def _on_one_cpu():
    return jax.default_backend() == "cpu" and keras.distribution.distribution() is None
