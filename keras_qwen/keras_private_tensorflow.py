"""All that this package uses of Keras's private API on TensorFlow alone; a test of this name watches it."""

import contextlib

import keras
from keras.src.backend.tensorflow.core import Variable
from keras.src.backend.tensorflow.optimizer import TFOptimizer

_KERAS_INITIALIZE = Variable._initialize
# What Keras's optimizers do on TensorFlow by `tf.distribute` and with `tf.Variable`s; without these methods they do as
# on the other backends, with Keras's variables.
_OF_TENSORFLOW = (
    "_apply_weight_decay",
    "_backend_increment_gradient_accumulators",
    "_backend_update_step",
    "_clip_by_norm",
    "_overwrite_model_variables_with_average_value",
    "_var_key",
    "add_variable_from_reference",
    "assign",
    "assign_add",
    "assign_sub",
)


def initialize_variables(make):
    """From now on a Keras variable holds `make(variable, value)`, a `tf.Variable`; Keras's own where that is None.

    Args:
        make: function of a Keras variable and its initial value, a tensor or a function that returns one. It may set
            the variable's layout by `set_layout`.
    """

    def initialize(variable, value):
        made = make(variable, value)
        _KERAS_INITIALIZE(variable, value if made is None else made)

    Variable._initialize = initialize


def set_layout(variable, layout):
    """Notes how a variable lies on a mesh."""
    variable._layout = layout


class _Deferred(keras.StatelessScope):
    def __init__(self):
        super().__init__(initialize_variables=False)
        self.assigned = {}

    def add_update(self, update):
        self.assigned[id(update[0])] = update[0]
        super().add_update(update)


@contextlib.contextmanager
def deferred_assignments():
    """Variables that are assigned inside have their new value at once for Keras's code, and get it at the end.

    So nothing reads a `tf.Variable` after it was assigned. Inside, Keras's optimizers use Keras's variables alone.
    """
    with _optimizers_without_tensorflow(), _Deferred() as scope:
        yield
    for variable in scope.assigned.values():
        variable.assign(scope.get_current_value(variable))


def build_metrics(model, batch):
    """Makes the variables of the metrics given to `compile`, which Keras does in the first step it traces."""
    model._symbolic_build(data_batch=batch)


@contextlib.contextmanager
def recorded_gradients(optimizer):
    """Inside, the optimizer updates nothing; yields the list that the gradients given to it go into."""
    gradients = []
    optimizer.apply_gradients = lambda pairs: gradients.extend(gradient for gradient, _ in pairs)
    try:
        yield gradients
    finally:
        del optimizer.apply_gradients


@contextlib.contextmanager
def summed_gradients(optimizer):
    """Inside, the optimizer does not sum gradients over the replicas of a `tf.distribute` strategy."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    optimizer._all_reduce_sum_gradients = lambda pairs: pairs
    try:
        yield
    finally:
        vars(optimizer).pop("_all_reduce_sum_gradients", None)  # the replicas are threads, of which one was first


@contextlib.contextmanager
def _optimizers_without_tensorflow():
    own = {name: TFOptimizer.__dict__[name] for name in _OF_TENSORFLOW}
    key_of = own["_var_key"]
    for name in own:
        delattr(TFOptimizer, name)
    TFOptimizer._var_key = lambda optimizer, variable: key_of(optimizer, variable._value)  # as it was built with
    try:
        yield
    finally:
        for name, method in own.items():
            setattr(TFOptimizer, name, method)
