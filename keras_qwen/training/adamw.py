"""AdamW that needs less memory: updated in place on TensorFlow, and with moments of fewer bits everywhere."""

import importlib
import re

import keras
from keras import ops

from keras_qwen import keras_private
from keras_qwen.partitioning import mesh_sizes, partition_of
from keras_qwen.training.moments import Bfloat16Moments, moment_storage
from keras_qwen.training.rounding import random_bits, stochastic_bfloat16

MOMENTS = ("bfloat16", "int8")
UNDECAYED = ("scale", "bias", "magnitude")


@keras.saving.register_keras_serializable(package="keras_qwen")
class AdamW(keras_private.OwnUpdate):
    """Keras's AdamW, with the same arguments and numbers, but for norms and biases, and two means against its memory.

    Norms' scales, biases and DoRA's magnitudes are not decayed, as is usual for language models: decay pulls them to 0,
    not to where they do nothing. `undecayed=()` decays all, as Keras does.

    As it is, it keeps Keras's state, and TensorFlow updates weights and moments in place where Keras's own needs
    arrays of the size of the weights beside them (`QwenCausalLM.fit` does that with Keras's own Adam and AdamW, too).

    Args:
        learning_rate, weight_decay, beta_1, beta_2, epsilon, ...: as of `keras.optimizers.AdamW`.
        moments: how the two moments are kept. None as in Keras, in the weights' dtype: 8 bytes a float32 weight.
            `"bfloat16"`: 4 bytes a weight. `"int8"`: 2 bytes and a scale for each block of 128 (64, 32) numbers of a
            row; vectors, and tensors below 4096 entries, stay float32. Both are rounded stochastically, and computed
            with in float32.
        undecayed: names of variables (the last part of their path) without weight decay.
        stochastic_rounding: rounds bfloat16 weights up or down with the probability that keeps small updates on
            average, which rounding to nearest loses; for models with `dtype="bfloat16"`.

    Raises:
        ValueError: for unknown `moments`, for `amsgrad` with `moments` or `stochastic_rounding`, and when it is built
            with stochastic rounding on weights of another dtype than bfloat16.

    Example:
        >>> model.compile(keras_qwen.training.AdamW(1e-5, moments="int8"))

    References: Loshchilov and Hutter, 2019, arXiv:1711.05101; Dettmers et al., 2021, arXiv:2110.02861.
    """

    def __init__(
        self, learning_rate=0.001, *args, moments=None, stochastic_rounding=False, undecayed=UNDECAYED, **kwargs
    ):
        super().__init__(learning_rate, *args, **kwargs)
        self.undecayed = tuple(undecayed)
        if self.undecayed:
            # TensorFlow's own variables, which Keras's optimizer asks about there, are called "scale:0".
            patterns = [rf"(?:\A|/){re.escape(name)}(?::\d+)?\Z" for name in self.undecayed]
            self.exclude_from_weight_decay(var_names=patterns)
        if moments is not None and moments not in MOMENTS:
            raise ValueError(f"moments must be None or one of {', '.join(MOMENTS)}, not {moments!r}.")
        self.moments, self.stochastic_rounding = moments, stochastic_rounding
        self.decays_in_update = moments is not None or stochastic_rounding
        if self.decays_in_update and self.amsgrad:
            raise ValueError("amsgrad works with neither moments nor stochastic_rounding.")

    def build(self, variables):
        if self.built:
            return
        if self.stochastic_rounding:
            for variable in variables:
                if keras.backend.standardize_dtype(variable.dtype) != "bfloat16":
                    raise ValueError(
                        f"stochastic_rounding rounds bfloat16 weights, but {variable.path} is {variable.dtype}. "
                        f"Make the model with dtype='bfloat16', or leave stochastic_rounding out."
                    )
        if self.moments is None:
            super().build(variables)
            return
        keras.optimizers.Optimizer.build(self, variables)
        self._storages, self._states = [], []
        for variable in variables:
            storage = moment_storage(self.moments, tuple(variable.shape))
            self._storages.append(storage)
            self._states.append([self._add_state(variable, *kept) for kept in storage.state(tuple(variable.shape))])

    def _add_state(self, variable, name, shape, dtype):
        layout = keras_private.layout_of(variable)
        if layout is not None and not partition_of(layout).divides(shape, mesh_sizes(layout.device_mesh)):
            layout = None  # scales of blocks that the mesh splits in the middle
        name = f"{variable.path.replace('/', '_')}_{name}"
        return self.add_variable(shape, initializer="zeros", dtype=dtype, layout=layout, name=name)

    def update_step(self, gradient, variable, learning_rate):
        if not self.decays_in_update:
            super().update_step(gradient, variable, learning_rate)
            return
        index = keras_private.variable_index(self, variable)
        if self.moments is None:
            # They are bfloat16, as the weights are.
            storage, state = Bfloat16Moments(), keras_private.adam_moments(self, variable)
        else:
            storage, state = self._storages[index], self._states[index]
        step = ops.cast(self.iterations, "int32") + 1
        power = ops.cast(step, "float32")
        rate = ops.cast(learning_rate, "float32")
        numbers = (
            rate * ops.sqrt(1 - ops.power(self.beta_2, power)) / (1 - ops.power(self.beta_1, power)),
            1.0 - rate * keras_private.weight_decay(self, variable),
            step * 7919 + index * 104729,  # another seed for each step and variable
        )
        updated, state_values = self._compiled(
            self._updated, storage, numbers, ops.convert_to_tensor(variable), gradient, [x.value for x in state]
        )
        for kept, value in zip([variable, *state], [updated, *state_values], strict=True):
            self.assign(kept, value)

    @property
    def _compiled(self):
        """Calls a function of tensors as one compiled operation, which has no arrays for what is in between."""
        return importlib.import_module(f"keras_qwen.training.step_{keras.backend.backend()}").compiled

    def _updated(self, storage, numbers, weights, gradient, state):
        rate, kept, seed = numbers
        dtype, gradient = weights.dtype, ops.cast(gradient, "float32")
        first, second = storage.read(state)
        first = first + (gradient - first) * (1.0 - self.beta_1)
        second = second + (ops.square(gradient) - second) * (1.0 - self.beta_2)
        weights = ops.cast(weights, "float32") * kept - rate * first / (ops.sqrt(second) + self.epsilon)
        if self.stochastic_rounding:
            weights = stochastic_bfloat16(weights, random_bits(weights.shape, seed + 1))
        return ops.cast(weights, dtype), storage.write(first, second, seed)

    def get_config(self):
        return {
            **super().get_config(),
            "moments": self.moments,
            "stochastic_rounding": self.stochastic_rounding,
            "undecayed": list(self.undecayed),
        }
