"""The compiled functions on JAX: the weights are arguments, and the memory of the state is used again."""

import jax
import keras


class Steps:
    """The two functions of decoding, compiled once for each shape and plan.

    Args:
        weights: function that returns the model's variables.
        prefill, decode: of `Decoder`.
    """

    def __init__(self, weights, prefill, decode):
        self.weights = weights
        self.prefill, self.decode = self._compiled(prefill), self._compiled(decode)

    def session(self, shape, dtype, layers, plan):
        """A `Session` with an empty cache: for each layer keys and values of a shape."""
        cache = [tuple(jax.numpy.zeros(shape, dtype) for _ in range(2)) for _ in range(layers)]
        return Session(self, cache, plan)

    def _compiled(self, function):
        def pure(values, state, *arguments, plan):
            with keras.StatelessScope(state_mapping=list(zip(self.weights(), values, strict=True))):
                return function(state, *arguments, plan)

        return jax.jit(pure, static_argnames="plan", donate_argnums=1)


class Session:
    """One run of decoding, with its state."""

    def __init__(self, steps, cache, plan):
        self._steps, self._state, self._plan = steps, (cache, None), plan
        self._variables = steps.weights()

    def prefill(self, *arguments):
        return self._call(self._steps.prefill, arguments)

    def decode(self, *arguments):
        return self._call(self._steps.decode, arguments)

    def _call(self, function, arguments):
        values = [variable.value for variable in self._variables]
        chosen, self._state = function(values, self._state, *arguments, plan=self._plan)
        return chosen
