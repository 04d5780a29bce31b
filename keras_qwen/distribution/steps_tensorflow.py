"""What `fit`, `evaluate` and `predict` call on a mesh of DTensor, in the place of Keras's own functions.

Batches come from the host and logs go there. A step is one graph, a training step two: DTensor stops for ever in one
that has gradients and updates. What is assigned inside is assigned at the end, because DTensor reads the old value of a
variable after its assignment.
"""

import tensorflow as tf
from tensorflow.experimental import dtensor

from keras_qwen.distribution.mesh_tensorflow import gathered, layout_of, spread
from keras_qwen.keras_private_tensorflow import build_metrics, deferred_assignments, recorded_gradients


def step_function(distribution, model, step, trains):
    """`step(batch)` as a function of an iterator over batches on the host; what it returns lies on the host, too."""
    compiled = _training(distribution, model, step) if trains else _compiled(model, step)

    def run(iterator):
        outputs = None
        for _ in range(model.steps_per_execution):
            batch = next(iterator, None)
            if batch is None:
                break
            batch = on_mesh(distribution, batch)
            if model.compiled:
                build_metrics(model, batch)
            outputs = compiled(batch)
        if outputs is None:
            raise StopIteration
        return tf.nest.map_structure(_on_host, outputs)

    return run


def _training(distribution, model, step):
    optimizer, variables = model.optimizer, list(model.trainable_variables)
    distribution.check_optimizer(optimizer)

    def compute(batch):
        with recorded_gradients(optimizer) as gradients:
            logs = step(batch)
        return logs, gradients

    def update(gradients):
        for variable in variables:  # the update is computed where the moments are
            variable.assign(distribution.constrained([variable.value], [distribution.update_layout(variable)])[0])
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    compute, update = _compiled(model, compute), _compiled(model, update)

    def run(batch):
        logs, gradients = compute(batch)
        update(gradients)
        return logs

    return run


def _compiled(model, function):
    def deferred(*arguments):
        with deferred_assignments():
            return function(*arguments)

    return deferred if model.run_eagerly else tf.function(deferred, autograph=False)


def on_mesh(distribution, batch):
    """A batch split over the mesh; whole on each device if its rows are not divided by it."""

    def put(x):
        if x is None or isinstance(x, tf.experimental.Optional):  # which stands for None in a dataset
            return None
        x = tf.convert_to_tensor(x)
        layout = distribution.batch_layout(x.shape)
        return spread(x, layout_of(layout if x.shape[0] % distribution.num_model_replicas == 0 else layout.whole()))

    return tf.nest.map_structure(put, batch)


def _on_host(x):
    return tf.convert_to_tensor(gathered(x)) if dtensor.is_dtensor(x) else x
