"""All that this package uses of Keras's private API, in one place; `tests/test_keras_private.py` watches it."""

import contextlib
import functools
import inspect

import keras
from keras.src.backend.common import global_state
from keras.src.random.seed_generator import global_seed_generator
from keras.src.trainers.data_adapters import get_data_adapter
from keras.src.trainers.data_adapters.data_adapter import DataAdapter as DataAdapter  # the base of what `fit` takes

_UNINITIALIZED = "uninitialized_variables"  # where Keras keeps the variables created in a stateless scope


@contextlib.contextmanager
def deferred_initialization():
    """Variables created inside hold no memory until the end, and are initialised there, one by one.

    Keras itself does so for variables that are created in a `StatelessScope`. Should the body raise, they are
    dropped instead of being initialised.
    """
    with keras.StatelessScope():
        try:
            yield
        except BaseException:
            global_state.set_global_attribute(_UNINITIALIZED, [])
            raise


@contextlib.contextmanager
def abstract_variables():
    """Variables created inside have a shape and a dtype, and never get a value: for planning without memory."""
    with keras.StatelessScope():
        try:
            yield
        finally:
            global_state.set_global_attribute(_UNINITIALIZED, [])


def set_initializer(variable, initializer):
    """Replaces the initialiser of a variable whose initialisation is deferred.

    Args:
        variable: the variable.
        initializer: called as `initializer(shape, dtype=...)`; one that has an argument `sharding` is given JAX's, if
            the variable lies on several devices. It is never traced, so it may read files.
    """
    if variable._value is not None:
        raise RuntimeError(f"{variable.path} is initialised already; Keras no longer defers it.")
    variable._initializer = initializer
    if keras.backend.backend() == "jax":
        variable._initialize_with_initializer = functools.partial(_initialize_eagerly, variable)


def _initialize_eagerly(variable, initializer):
    """In the place of Keras's way on JAX, which compiles the initialiser of a large variable that is split."""
    del variable._initialize_with_initializer
    variable._initialize_layout()
    arguments = {"dtype": variable._dtype}
    if variable._layout is not None and "sharding" in inspect.signature(initializer).parameters:
        arguments["sharding"] = sharding_of(variable)
    variable._initialize(variable._convert_to_tensor(initializer(variable._shape, **arguments)))


def release(variable):
    """Lets go of a variable's value, on JAX; the next `assign` gives it another one."""
    variable._value = None


@contextlib.contextmanager
def unlocked(layer):
    """Inside, a layer that is built takes new variables and sublayers."""
    layer._tracker.unlock()
    try:
        yield
    finally:
        layer._tracker.lock()


def replace_variable(layer, attribute, values):
    """Gives a built layer another variable, of another shape, in the place of one that it has."""
    old = getattr(layer, attribute)
    with unlocked(layer):
        layer._untrack_variable(old)
        layer._tracker.unlock()
        new = layer.add_weight(
            name=old.name,
            shape=values.shape,
            dtype=old.dtype,
            initializer=lambda shape, dtype=None: values,
            trainable=old.trainable,
            autocast=old._autocast,
        )
        setattr(layer, attribute, new)


def set_symbolic_shape(tensor, shape):
    """Changes what a functional model says of the shape of an output."""
    tensor._shape = shape


def optimized_variables(optimizer):
    """The variables that an optimizer was built for."""
    return list(optimizer._trainable_variables)


def strategy_scope(optimizer):
    """A context in which an optimizer may make variables: that of the `tf.distribute` strategy it was made under."""
    strategy = getattr(optimizer, "_distribution_strategy", None)
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def loss_tracker(model):
    """The running mean that `fit` and `evaluate` report as "loss"."""
    return model._loss_tracker


class SeveralProcesses:
    """Mixin, in front of `keras.Model`, of a model that trains under `tf.distribute.MultiWorkerMirroredStrategy`.

    Keras 3.15 fails there in two places: it looks at a batch of `fit`'s data for what is left to build, which does not
    work with batches that hold dicts, and of a step's logs it takes the mean over a dimension that they do not have.
    """

    def _make_function(self, step_function, *args, **kwargs):
        resolver = getattr(getattr(self, "distribute_strategy", None), "cluster_resolver", None)
        if resolver is None or sum(len(tasks) for tasks in resolver.cluster_spec().as_dict().values()) < 2:
            return super()._make_function(step_function, *args, **kwargs)

        def step(data):
            return keras.tree.map_structure(lambda x: keras.ops.expand_dims(x, 0), step_function(data))

        return super()._make_function(step, *args, **kwargs)

    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        if self._compile_loss is not None or self._compile_metrics is not None:
            super()._maybe_symbolic_build(iterator=iterator, data_batch=data_batch)


class OwnUpdate(keras.optimizers.AdamW):
    """AdamW as a base for optimizers whose `update_step` may decay the weights itself, in the same pass."""

    decays_in_update = False

    def _apply_weight_decay(self, variables):
        if not self.decays_in_update:
            super()._apply_weight_decay(variables)


@contextlib.contextmanager
def replaced_update(optimizer, update_step):
    """Inside, Keras's Adam or AdamW calls `update_step(gradient, variable, learning_rate)`, which decays weights, too.

    Not on PyTorch, where Keras updates all variables in one call.

    Everything else stays Keras's: clipping, averaging of weights, the counter of steps.
    """
    optimizer.update_step, optimizer._apply_weight_decay = update_step, lambda variables: None
    try:
        yield
    finally:
        del optimizer.update_step, optimizer._apply_weight_decay


def adam_moments(optimizer, variable):
    """Keras's Adam's state of a variable: its first and second moment."""
    index = optimizer._get_variable_index(variable)
    return optimizer._momentums[index], optimizer._velocities[index]


def variable_index(optimizer, variable):
    """Number of a variable in the list the optimizer was built with."""
    return optimizer._get_variable_index(variable)


def weight_decay(optimizer, variable):
    """The decay that Keras's optimizer applies to a variable, 0.0 for none."""
    if optimizer.weight_decay is None or not optimizer._use_weight_decay(variable):
        return 0.0
    return optimizer.weight_decay


def data_adapter(x, y, sample_weight, batch_size, steps, shuffle, class_weight):
    """What `fit` makes of its data: an adapter that gives batches."""
    return get_data_adapter(x, y, sample_weight, batch_size, steps, shuffle, class_weight)


def is_seeded():
    """Whether `keras.utils.set_random_seed` was called."""
    return global_state.get_global_attribute("global_random_seed") is not None


def global_seed_state():
    """The variable behind all of Keras's random numbers for which no seed is given."""
    return global_seed_generator().state


class AxesLayout(keras.distribution.TensorLayout):
    """A layout in which a dimension may be split over several mesh axes: a tuple of names; Keras's takes one."""

    def _validate_axes(self):
        if self._device_mesh is None:
            return
        named = [name for axes in self._axes for name in (axes if isinstance(axes, tuple) else (axes,)) if name]
        if unknown := set(named) - set(self._device_mesh.axis_names):
            raise ValueError(f"The mesh has the axes {self._device_mesh.axis_names}, not {sorted(unknown)}.")
        if len(set(named)) != len(named):
            raise ValueError(f"A mesh axis splits one dimension at most; in {self._axes} one splits several.")

    def whole(self):
        """The layout of the same mesh that splits nothing."""
        return AxesLayout([None] * len(self.axes), self.device_mesh)


def layout_of(variable):
    """The layout that a variable was made with; None without a distribution."""
    return getattr(variable, "_layout", None)


def sharding_of(variable):
    """JAX's sharding of a variable that was made under a distribution; None without one, and on other backends."""
    if keras.backend.backend() != "jax":
        return None
    layout = layout_of(variable)
    return getattr(layout, "backend_layout", layout)


@contextlib.contextmanager
def layouts_for_state(variables, layouts):
    """Inside, an optimizer gives its state of each variable the layout named here instead of the variable's own."""
    own = [layout_of(variable) for variable in variables]
    for variable, layout in zip(variables, layouts, strict=True):
        variable._layout = layout
    try:
        yield
    finally:
        for variable, layout in zip(variables, own, strict=True):
            variable._layout = layout
