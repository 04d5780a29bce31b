"""Tells the active distribution, if there is one, what the dimensions of a tensor count, so that it can split them."""

import math

import keras

from keras_qwen.keras_private import strategy_scope


def placed(tensor, *axes, gradient=None):
    """The tensor, on the devices where the active distribution wants its parts; without one, the tensor as it is.

    Args:
        tensor: any tensor.
        axes: what each of its dimensions counts, as of `keras_qwen.partitioning.activation_partition`.
        gradient: the same for its gradient, where that is to lie otherwise.

    Example:
        >>> placed(keras.ops.ones((2, 4, 8)), "batch", "residual", "embed").shape
        (2, 4, 8)
    """
    place = getattr(keras.distribution.distribution(), "place", None)
    return tensor if place is None or isinstance(tensor, keras.KerasTensor) else place(tensor, axes, gradient)


def product(multiply, inputs, weight):
    """`multiply(inputs, weight)`, where a weight that is split only to save memory is gathered for it.

    Args:
        multiply: function of two tensors, the same object for all calls of a kind.
        inputs: tensor.
        weight: a variable.
    """
    distributed = getattr(keras.distribution.distribution(), "product", None)
    if distributed is None or isinstance(inputs, keras.KerasTensor):
        return multiply(inputs, weight)
    return distributed(multiply, inputs, keras.ops.convert_to_tensor(weight), weight.path)


def for_each_device(attend, query, key, value, *segments):
    """`attend(query, key, value, *segments)`, on a mesh by each device for its own rows and heads.

    Nothing of attention crosses rows or groups of heads, so that no device need know of the others: kernels and loops
    run as they do on one.

    Args:
        attend: function of tensors.
        query, key, value: tensors (batch, length, heads, head_dim).
        segments: integers (batch, length), or None.
    """
    spread = getattr(keras.distribution.distribution(), "for_each_device", None)
    if spread is None or isinstance(query, keras.KerasTensor):
        return attend(query, key, value, *segments)
    return spread(attend, query, key, value, *segments)


def whole(tensor):
    """The tensor with all of it on every device of the active distribution."""
    return keras.distribution.distribution().constrained_whole(tensor)


def build_optimizer(optimizer, variables):
    """Builds an optimizer, its state split as the active distribution wants it."""
    build = getattr(keras.distribution.distribution(), "build_optimizer", type(optimizer).build)
    with strategy_scope(optimizer):
        build(optimizer, variables)


def update_layouts(variables):
    """How gradients, moments and the update of each variable are split; None without a distribution that says so."""
    layout = getattr(keras.distribution.distribution(), "update_layout", None)
    return None if layout is None else [layout(variable) for variable in variables]


def constrained(values, layouts):
    """Tensors split as their layouts say; as they are where layouts is None."""
    return values if layouts is None else keras.distribution.distribution().constrained(values, layouts)


def step_function(model, step, *, trains=False):
    """A step of a model in the form that `fit`, `evaluate` or `predict` call, made by the active distribution.

    Args:
        model: the model.
        step: its `train_step`, `test_step` or `predict_step`.
        trains: whether it is the first of them.

    Returns:
        A function of an iterator over batches; None where Keras's own does.
    """
    make = getattr(keras.distribution.distribution(), "step_function", None)
    return None if make is None else make(model, step, trains)


def compiled(function):
    """A function of tensors on the active mesh as one operation; None where it may be called as it is."""
    compile_function = getattr(keras.distribution.distribution(), "compiled", None)
    return None if compile_function is None else compile_function(function)


def on_host(tensor):
    """A tensor of the active distribution as a numpy array."""
    return keras.distribution.distribution().on_host(tensor)


def on_dtensor():
    """Whether tensors lie on a mesh of TensorFlow's DTensor, which splits less kinds of operations than XLA does."""
    return keras.backend.backend() == "tensorflow" and hasattr(keras.distribution.distribution(), "place")


def check_model(model):
    """Raises ValueError where the active distribution is not made for a model."""
    check = getattr(keras.distribution.distribution(), "check_model", None)
    if check is not None:
        check(model)


def batch_axes():
    """Names of the mesh axes that the active distribution splits a batch over; none without one."""
    distribution = keras.distribution.distribution()
    if distribution is None:
        return ()
    axes = getattr(distribution, "batch_axes", (distribution.batch_dim_name,))
    return tuple(axis for axis in axes if _mesh_size(distribution, axis) > 1)


def batch_shards():
    """Parts that the active distribution splits a batch into; 1 without one."""
    return math.prod(_mesh_size(keras.distribution.distribution(), axis) for axis in batch_axes())


def _mesh_size(distribution, axis):
    mesh = distribution.device_mesh
    return mesh.shape[mesh.axis_names.index(axis)]
