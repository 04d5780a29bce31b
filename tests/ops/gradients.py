"""Gradients of functions of arrays, the same way on every backend."""

import keras
import numpy as np

BACKEND = keras.backend.backend()


def gradients(function, *arrays, mode="eager"):
    """Value and gradients of a scalar function of arrays, on the backend that Keras runs on."""
    tensors = [keras.ops.convert_to_tensor(a) for a in arrays]
    if BACKEND == "torch":
        tensors = [t.requires_grad_() for t in tensors]
        value = function(*tensors)
        value.backward()
        value, found = value.detach(), [t.grad for t in tensors]
    elif BACKEND == "jax":
        import jax

        both = jax.value_and_grad(function, argnums=tuple(range(len(arrays))))
        value, found = (jax.jit(both) if mode == "compiled" else both)(*tensors)
    else:
        import tensorflow as tf

        def both(tensors):
            with tf.GradientTape() as tape:
                tape.watch(tensors)
                value = function(*tensors)
            return value, tape.gradient(value, tensors)

        value, found = (both if mode == "eager" else tf.function(both, jit_compile=mode == "compiled"))(tensors)
    return float(value), [np.asarray(keras.ops.cast(g, "float32")).astype("float64") for g in found]
