"""The compiled functions on TensorFlow: graphs that change the cache's variables in place.

On a CPU they run operation by operation, which is faster there than XLA's code for single rows; on a GPU XLA's is.
"""

import tensorflow as tf


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
        cache = [tuple(tf.Variable(tf.zeros(shape, dtype), trainable=False) for _ in range(2)) for _ in range(layers)]
        # A graph holds the model's variables; with other ones (an adapter's, say) it has to be another graph.
        variables = tuple(id(variable) for variable in self._weights())
        return Session(self, cache, plan, (tuple(shape), plan, variables))

    def compiled(self, name, key, cache, arguments, plan):
        """The graph of a function for arguments of these shapes."""
        key = (name, tuple(arguments[0].shape), *key)
        if key not in self._compiled:
            graph = _graph(self._functions[name], plan)
            self._compiled[key] = graph.get_concrete_function(cache, *arguments)
        return self._compiled[key]


class Session:
    """One run of decoding, with its cache."""

    def __init__(self, steps, cache, plan, key):
        self._steps, self._cache, self._plan, self._key = steps, cache, plan, key

    def prefill(self, *arguments):
        return self._call("prefill", arguments)

    def decode(self, *arguments):
        return self._call("decode", arguments)

    def _call(self, name, arguments):
        arguments = [tf.nest.map_structure(_tensor, argument) for argument in arguments]
        return self._steps.compiled(name, self._key, self._cache, arguments, self._plan)(self._cache, *arguments)


def _graph(function, plan):
    @tf.function(jit_compile=bool(tf.config.list_logical_devices("GPU")), autograph=False)
    def run(cache, *arguments):
        chosen, _ = function(cache, *arguments, plan)  # a returned variable would be read, and copied
        return chosen

    return run


def _tensor(value):
    return None if value is None else tf.convert_to_tensor(value)  # a number would be traced as a constant
