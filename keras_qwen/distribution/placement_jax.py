"""Where tensors lie, on JAX: sharding constraints, from which XLA derives the collectives."""

from functools import partial

import jax


def prepare(mesh):
    """Nothing: Keras's variables lie on a mesh as they are."""


def constrained(tensor, layout):
    """The tensor, split as a layout says."""
    sharding = layout.backend_layout
    return jax.lax.with_sharding_constraint(tensor, sharding) if _traced(tensor) else jax.device_put(tensor, sharding)


def _traced(tensor):
    return isinstance(tensor, jax.core.Tracer)


def on_host(tensor):
    """The tensor as a numpy array."""
    return jax.device_get(tensor)


def product(multiply, inputs, weight, split, whole):
    """`multiply(inputs, weight)` with the weight gathered to `whole`, its gradient scattered to `split`.

    The gathered weight is not kept for the backward pass, but gathered again.
    """
    if split.axes == whole.axes:
        return multiply(inputs, weight)
    return _product(multiply, split.backend_layout, whole.backend_layout, inputs, weight)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _product(multiply, split, whole, inputs, weight):
    return multiply(inputs, _constrained(weight, whole))


def _forward(multiply, split, whole, inputs, weight):
    return _product(multiply, split, whole, inputs, weight), (inputs, weight)


def _backward(multiply, split, whole, saved, slopes):
    inputs, weight = saved
    _, gradients = jax.vjp(multiply, inputs, _constrained(weight, whole))
    of_inputs, of_weight = gradients(slopes)
    return of_inputs, _constrained(of_weight, split)


_product.defvjp(_forward, _backward)


def _constrained(tensor, sharding):
    return jax.lax.with_sharding_constraint(tensor, sharding)
