"""The compiled functions on TensorFlow: graphs that change the cache's variables in place.

On a CPU they run operation by operation, which is faster there than XLA's code for single rows; on a GPU XLA's is.
"""

import tensorflow as tf


class Steps:
    """The two functions of decoding, compiled.

    Args:
        weights: function that returns the model's variables.
        prefill, decode: of `Decoder`.
    """

    def __init__(self, weights, prefill, decode):
        self._weights = weights
        self._prefill, self._decode = prefill, decode
        self._functions = {}

    def new_cache(self, shape, dtype, layers):
        return [tuple(tf.Variable(tf.zeros(shape, dtype), trainable=False) for _ in range(2)) for _ in range(layers)]

    def prefill(self, cache, *arguments, plan):
        return self._call(self._prefill, cache, arguments, plan)

    def decode(self, cache, *arguments, plan):
        return self._call(self._decode, cache, arguments, plan)

    def _call(self, function, cache, arguments, plan):
        arguments = [tf.nest.map_structure(_tensor, argument) for argument in arguments]
        shapes = tuple(cache[0][0].shape), tuple(arguments[0].shape)
        # The graph holds the model's variables; with other ones (an adapter's, say) it is another graph.
        key = (function, plan, shapes, tuple(id(variable) for variable in self._weights()))
        if key not in self._functions:
            self._functions[key] = _compiled(function, plan).get_concrete_function(cache, *arguments)
        return self._functions[key](cache, *arguments), cache


def _compiled(function, plan):
    @tf.function(jit_compile=bool(tf.config.list_logical_devices("GPU")), autograph=False)
    def run(cache, *arguments):
        chosen, _ = function(cache, *arguments, plan)  # a returned variable would be read, and copied
        return chosen

    return run


def _tensor(value):
    return None if value is None else tf.convert_to_tensor(value)  # a number would be traced as a constant
