"""The compiled functions on TensorFlow."""

import tensorflow as tf


class Steps:
    """Args: `weights()` returns the variables; `prefill` and `decode` are those of `Decoder`."""

    def __init__(self, weights, prefill, decode):
        self._weights = weights
        self._functions = {}
        self._prefill, self._decode = prefill, decode

    def new_cache(self, cache):
        return cache

    def prefill(self, cache, *arguments, plan):
        return self._call(self._prefill, cache, arguments, plan)

    def decode(self, cache, *arguments, plan):
        return self._call(self._decode, cache, arguments, plan)

    def _call(self, function, cache, arguments, plan):
        key = (function, plan, tuple(id(variable) for variable in self._weights()))
        if key not in self._functions:
            self._functions[key] = tf.function(lambda cache, *arguments: function(cache, *arguments, plan))
        return self._functions[key](cache, *tf.nest.map_structure(_tensor, arguments))


def _tensor(value):
    return None if value is None else tf.convert_to_tensor(value)  # a number would be traced as a constant
