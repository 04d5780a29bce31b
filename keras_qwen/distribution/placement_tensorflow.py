"""Where tensors lie, on TensorFlow: DTensor's layouts, from which it derives the collectives.

DTensor splits a dimension over one axis of a mesh. So a mesh has `data` or `fsdp`, and what JAX would split over
`model` and `fsdp` in one dimension is split over `model` alone.
"""

import keras
import tensorflow as tf

from keras_qwen.distribution.mesh_tensorflow import gathered as on_host  # noqa: F401
from keras_qwen.distribution.mesh_tensorflow import layout_of, spread, use_mesh_variables
from keras_qwen.distribution.steps_tensorflow import step_function as step_function
from keras_qwen.keras_private import AxesLayout
from keras_qwen.keras_private import layout_of as layout_of_variable
from keras_qwen.ops.recompute import after


def prepare(mesh):
    """Checks a mesh, and makes Keras's variables follow it."""
    if mesh.get("data", 1) > 1 and mesh.get("fsdp", 1) > 1:
        both = mesh["data"] * mesh["fsdp"]
        raise ValueError(
            f"On TensorFlow a batch is split over one axis, but the mesh has data={mesh['data']} and "
            f"fsdp={mesh['fsdp']}: take data={both} or fsdp={both}, or JAX."
        )
    use_mesh_variables()


def constrained(tensor, layout):
    """The tensor, split as a layout says; so is its gradient."""
    return moved(tensor, layout, layout)


def moved(tensor, layout, of_gradient):
    """The tensor, split as one layout says, and its gradient as another."""
    layout, of_gradient = layout_of(layout), layout_of(of_gradient)
    tensor = tf.convert_to_tensor(tensor)  # it may be a Keras variable
    if tf.executing_eagerly() or not tensor.dtype.is_floating:
        return spread(tensor, layout)

    @tf.custom_gradient  # DTensor's own gradient fails where it is split another way than the tensor
    def run(tensor):
        return spread(tensor, layout), lambda slopes: spread(slopes, of_gradient)

    return run(tensor)


def product(multiply, inputs, weight, split, whole):
    """`multiply(inputs, weight)` with the weight gathered to `whole`, its gradient scattered to `split`.

    The gathered weight is not kept for the backward pass, but gathered again.
    """
    if split.axes == whole.axes:
        return multiply(inputs, weight)

    @tf.custom_gradient
    def run(inputs, weight):
        def backward(slopes):
            again, weight_again = after(slopes, inputs, weight)
            gathered = constrained(weight_again, whole)
            with tf.GradientTape() as tape:
                tape.watch([again, gathered])
                outputs = multiply(again, gathered)
            of_inputs, of_weight = tape.gradient(outputs, [again, gathered], slopes)
            return of_inputs, constrained(of_weight, split)

        return multiply(inputs, constrained(weight, whole)), backward

    return run(inputs, weight)


def compiled(function, device_mesh):
    """A function as a graph: called at once, it would have to bring every constant onto the mesh itself.

    Its results are whole on each device, so that they can be read as numpy arrays.
    """
    if not tf.executing_eagerly():
        return None

    def whole(x):
        return constrained(x, AxesLayout([None] * len(x.shape), device_mesh))

    return tf.function(lambda *inputs: tf.nest.map_structure(whole, function(*inputs)), autograph=False)


def check_optimizer(optimizer):
    """Raises ValueError for what needs branches in a graph that assign variables, and for variables off the mesh."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "LossScaleOptimizer does not work on a mesh of TensorFlow's: use dtype='mixed_bfloat16', which needs none."
        )
    if optimizer.gradient_accumulation_steps:
        raise ValueError(
            "gradient_accumulation_steps does not work on a mesh of TensorFlow's: compile(micro_batch_size=...) does."
        )
    if optimizer.use_ema and optimizer.ema_overwrite_frequency:
        raise ValueError(
            "ema_overwrite_frequency does not work on a mesh of TensorFlow's: leave it None, and the averages take the "
            "weights' place at the end of fit."
        )
    for variable in optimizer.variables:
        if layout_of_variable(variable) is None:
            raise ValueError(
                f"The optimizer's {variable.name} was made before this distribution was set, and does not lie on its "
                f"mesh. Call keras.distribution.set_distribution(...) first, then make the optimizer."
            )
