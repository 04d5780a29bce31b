"""The functions of decoding on torch: eager, without gradients."""

import torch
from keras import ops, tree


class Steps:
    """The two functions of decoding.

    Args:
        weights: not used; the layers read them.
        prefill, decode: of `Decoder`.
    """

    def __init__(self, weights, prefill, decode):
        self.prefill, self.decode = prefill, decode

    def session(self, shape, dtype, layers, plan):
        """A `Session` with an empty cache: for each layer keys and values of a shape."""
        cache = [tuple(ops.zeros(shape, dtype) for _ in range(2)) for _ in range(layers)]
        return Session(self, cache, plan)


class Session:
    """One run of decoding, with its state."""

    def __init__(self, steps, cache, plan):
        self._steps, self._state, self._plan = steps, (cache, None), plan

    def prefill(self, *arguments):
        return self._call(self._steps.prefill, arguments)

    def decode(self, *arguments):
        return self._call(self._steps.decode, arguments)

    def _call(self, function, arguments):
        arguments = [tree.map_structure(_tensor, argument) for argument in arguments]
        with torch.no_grad():
            chosen, self._state = function(self._state, *arguments, self._plan)
        return chosen


def _tensor(value):
    return None if value is None else ops.convert_to_tensor(value)
