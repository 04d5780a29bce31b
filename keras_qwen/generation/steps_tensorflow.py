"""The compiled functions on TensorFlow: graphs that change the cache's variables in place.

On a CPU they run operation by operation, which is faster there than XLA's code for single rows; on a GPU XLA's is.
"""

import tensorflow as tf

from keras_qwen.generation.steps_mesh_tensorflow import MeshSession, graph_of
from keras_qwen.ops.placement import on_dtensor

_ON_GPU = bool(tf.config.list_physical_devices("GPU"))
# One row leaves nothing to do side by side; handing operations from thread to thread costs more than they do.
_EXECUTOR = None if _ON_GPU else "SINGLE_THREADED_EXECUTOR"


class Steps:
    """The two functions of decoding, compiled once for each shape and plan.

    Args:
        weights: function that returns the model's variables.
        prefill, decode: of `Decoder`.
    """

    def __init__(self, weights, prefill, decode):
        self._weights = weights
        self._functions = {"prefill": prefill, "decode": decode}
        self._compiled = {}

    def session(self, shape, dtype, layers, plan):
        """A `Session` with an empty cache: for each layer keys and values of a shape."""
        # A graph holds the model's variables; with other ones (an adapter's, say) it has to be another graph.
        variables = tuple(id(variable) for variable in self._weights())
        if on_dtensor():
            return MeshSession(self, shape, dtype, layers, plan, (tuple(shape), variables))
        cache = [tuple(tf.Variable(tf.zeros(shape, dtype), trainable=False) for _ in range(2)) for _ in range(layers)]
        return Session(self, cache, plan, (tuple(shape), plan, variables))

    def mesh_graph(self, name, key):
        """The graph of a function on a mesh."""
        if (name, *key) not in self._compiled:
            self._compiled[name, *key] = graph_of(name, self._functions[name])
        return self._compiled[name, *key]

    def compiled(self, name, key, state, arguments, plan):
        """The graph of a function for arguments of these shapes."""
        key = (name, tuple(arguments[0].shape), *key)
        if key not in self._compiled:
            graph = _graph(self._functions[name], plan)
            self._compiled[key] = graph.get_concrete_function(*state, *arguments)
        return self._compiled[key]


class Session:
    """One run of decoding, with its state."""

    def __init__(self, steps, cache, plan, key):
        self._steps, self._state, self._plan, self._key = steps, (cache, None), plan, key

    def prefill(self, *arguments):
        return self._call("prefill", arguments)

    def decode(self, *arguments):
        return self._call("decode", arguments)

    def _call(self, name, arguments):
        arguments = [tf.nest.map_structure(_tensor, argument) for argument in arguments]
        graph = self._steps.compiled(name, self._key, self._state, arguments, self._plan)
        with tf.experimental.function_executor_type(_EXECUTOR):
            chosen, seen = graph(*self._state, *arguments)
        self._state = self._state[0], seen
        return chosen


def _graph(function, plan):
    @tf.function(jit_compile=_ON_GPU, autograph=False)
    def run(cache, seen, *arguments):
        chosen, (_, seen) = function((cache, seen), *arguments, plan)
        return chosen, seen  # but not the cache: returned variables would be read, and copied when they change

    return run


def _tensor(value):
    return None if value is None else tf.convert_to_tensor(value)  # a number would be traced as a constant
