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
        self._prefill, self._decode = prefill, decode

    def new_cache(self, shape, dtype, layers):
        return [tuple(ops.zeros(shape, dtype) for _ in range(2)) for _ in range(layers)]

    def prefill(self, cache, *arguments, plan):
        return self._call(self._prefill, cache, arguments, plan)

    def decode(self, cache, *arguments, plan):
        return self._call(self._decode, cache, arguments, plan)

    def _call(self, function, cache, arguments, plan):
        with torch.no_grad():
            return function(cache, *(tree.map_structure(_tensor, argument) for argument in arguments), plan)


def _tensor(value):
    return None if value is None else ops.convert_to_tensor(value)
