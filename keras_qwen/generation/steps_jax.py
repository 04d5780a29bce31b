"""The compiled functions on JAX: the weights are arguments, and the cache's memory is used again."""

import jax
import keras


class Steps:
    """The two functions of decoding, compiled.

    Args:
        weights: function that returns the model's variables.
        prefill, decode: of `Decoder`.
    """

    def __init__(self, weights, prefill, decode):
        self._weights = weights
        self._prefill, self._decode = self._compiled(prefill), self._compiled(decode)

    def new_cache(self, shape, dtype, layers):
        return [tuple(jax.numpy.zeros(shape, dtype) for _ in range(2)) for _ in range(layers)]

    def prefill(self, cache, *arguments, plan):
        return self._prefill(self._values(), cache, *arguments, plan=plan)

    def decode(self, cache, *arguments, plan):
        return self._decode(self._values(), cache, *arguments, plan=plan)

    def _values(self):
        return [variable.value for variable in self._weights()]

    def _compiled(self, function):
        def pure(values, cache, *arguments, plan):
            with keras.StatelessScope(state_mapping=list(zip(self._weights(), values, strict=True))):
                return function(cache, *arguments, plan)

        return jax.jit(pure, static_argnames="plan", donate_argnums=1)
