"""Where tensors lie, on JAX: sharding constraints, from which XLA derives the collectives."""

from functools import partial

import jax
import jax.numpy as jnp


def prepare(mesh):
    """Nothing: Keras's variables lie on a mesh as they are."""


def constrained(tensor, layout):
    """The tensor, split as a layout says."""
    sharding = layout.backend_layout
    return jax.lax.with_sharding_constraint(tensor, sharding) if _traced(tensor) else jax.device_put(tensor, sharding)


def moved(tensor, layout, of_gradient):
    """The tensor, split as one layout says, and its gradient as another."""
    return _moved(layout.backend_layout, of_gradient.backend_layout, tensor)


def _constrained(tensor, sharding):
    return jax.lax.with_sharding_constraint(tensor, sharding)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _moved(sharding, of_gradient, tensor):
    return _constrained(tensor, sharding)


_moved.defvjp(
    lambda sharding, of_gradient, tensor: (_constrained(tensor, sharding), None),
    lambda sharding, of_gradient, _, slopes: (_constrained(slopes, of_gradient),),
)


def parts_of_processes(layout, parts):
    found = [set() for _ in range(jax.process_count())]
    for device, (rows,) in layout.backend_layout.devices_indices_map((parts,)).items():
        found[device.process_index].update(range(*rows.indices(parts)))
    return [tuple(sorted(one)) for one in found]


def _traced(tensor):
    return isinstance(tensor, jax.core.Tracer)


def for_each_device(function, tensors, layouts, copies):
    """`function(*tensors)` on each device with its parts; the result lies as the first tensor.

    Args:
        function: of tensors.
        tensors: query, key, value, and others or None.
        layouts: of each.
        copies: where the heads of key and value are fewer than the devices that split the query's, how often each of
            them is needed times their number; else 1.
    """
    query, key, value, *others = tensors
    if copies > 1:
        key, value = (jnp.repeat(x, copies // x.shape[2], axis=2) for x in (key, value))
    given = [(x, layout) for x, layout in zip((query, key, value, *others), layouts, strict=True) if x is not None]
    present = [x is not None for x in (query, key, value, *others)]

    def local(*parts):
        parts = iter(parts)
        return function(*(next(parts) if is_there else None for is_there in present))

    specs = [layout.backend_layout.spec for _, layout in given]
    mesh = layouts[0].backend_layout.mesh
    spread = jax.shard_map(local, mesh=mesh, in_specs=tuple(specs), out_specs=specs[0], check_vma=False)
    return spread(*(x for x, _ in given))


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
