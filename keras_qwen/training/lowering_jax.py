"""The training step of a compiled model, lowered for shapes alone: for looking at what the compiler makes of it."""

import jax
import keras


def lowered_step(model, data, sharding_of):
    """`model.train_step`, traced and lowered as Keras's `fit` would.

    Args:
        model: a compiled model whose optimizer is built; its variables need no values.
        data: a batch as `fit` gets it, of `jax.ShapeDtypeStruct`s.
        sharding_of: function of a variable that returns how it lies on the devices.

    Returns:
        JAX's lowered function.
    """
    groups = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )

    def shape(variable):
        dtype = keras.backend.standardize_dtype(variable.dtype)
        return jax.ShapeDtypeStruct(tuple(variable.shape), dtype, sharding=sharding_of(variable))

    state = tuple([shape(variable) for variable in group] for group in groups)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    step = jax.jit(model.train_step, donate_argnums=0, out_shardings=(None, shardings))
    return step.lower(state, data)
