"""The functions on torch: eager, without gradients."""

import torch
from keras import ops, tree


class Steps:
    """Args: `weights()` returns the variables; `prefill` and `decode` are those of `Decoder`."""

    def __init__(self, weights, prefill, decode):
        self._prefill, self._decode = prefill, decode

    def new_cache(self, cache):
        return cache

    def prefill(self, cache, *arguments, plan):
        return self._call(self._prefill, cache, arguments, plan)

    def decode(self, cache, *arguments, plan):
        return self._call(self._decode, cache, arguments, plan)

    def _call(self, function, cache, arguments, plan):
        with torch.no_grad():
            arguments = tree.map_structure(lambda x: None if x is None else ops.convert_to_tensor(x), arguments)
            return function(cache, *arguments, plan)
