"""QuantizationMethods: a model whose projections are kept in few bits, and the way back."""

import dataclasses

import keras
import ml_dtypes  # noqa: F401  so that numpy knows bfloat16
import numpy as np

from keras_qwen.keras_private import deferred_initialization, set_initializer
from keras_qwen.layers.quantized_policy import QuantizedBasePolicy, quantization_of
from keras_qwen.layers.quantized_projection import REMEDY
from keras_qwen.ops.placement import on_dtensor

_HALF = ("bfloat16", "float16")


class QuantizationMethods:
    """Mixin of `QwenModel`: what differs when its projections are quantised."""

    @property
    def quantization(self):
        """How the projections are kept: `"int8"`, `"int4"`, `"nf4"`, or None for full weights."""
        return quantization_of(self.dtype_policy)

    def quantize(self, *args, **kwargs):
        """Keras's `quantize` takes the whole model in full precision and leaves it untrainable.

        Raises:
            ValueError: always, naming `from_pretrained(..., quantization=...)`.
        """
        if self.quantization is not None:
            raise ValueError(f"The model is quantised already ({self.quantization}); {REMEDY}.")
        raise ValueError(
            "Models are quantised while they are loaded, tensor by tensor: save_pretrained this one, and load it with "
            "from_pretrained(folder, quantization=...)."
        )

    def dequantize(self):
        """A model with full weights, namely those that this one computes with, and with its adapters.

        So an adapter can be merged with exactly the base that it was trained on. `save_pretrained` of the model writes
        its variables' dtype, not that of the checkpoint from which the base was quantised.

        Returns:
            The model, under the dtype policy that `from_pretrained` was given; not compiled. This one stays as it is.

        Raises:
            ValueError: if the model is not quantised.

        Example:
            >>> model = QwenCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B-Instruct", quantization="nf4")
            >>> model.enable_lora(16)
            >>> full = model.dequantize()
            >>> full.merge_adapter()
            >>> full.save_pretrained("merged")
        """
        if self.quantization is None:
            raise ValueError("The model is not quantised.")
        config = self.get_config() | {"dtype": self.dtype_policy.name, "frozen": None}
        with deferred_initialization():
            full = type(self).from_config(config)
            self._hand_over(full.variables)
        for name in ("source", "name_or_path", "_tokenizer", "_generation_config"):
            if getattr(self, name, None) is not None:
                setattr(full, name, getattr(self, name))
        if full.source is not None:
            dtype = np.dtype(full.dtype_policy.variable_dtype)
            full.source = dataclasses.replace(full.source, dtypes=dict.fromkeys(full.source.dtypes, dtype))
        return full

    def _hand_over(self, variables):
        """Makes variables of a model with full weights take the values of this one's."""
        values = {variable.path: variable for variable in self.variables}
        layers = {f"{layer.path}/kernel": layer for layer in self._flatten_layers() if hasattr(layer, "quantized")}

        def taken(path):
            def read(shape, dtype=None):
                value = values[path].value if path in values else layers[path].full_kernel()
                return keras.ops.cast(keras.ops.copy(value), dtype)

            return read

        for variable in variables:
            if variable.path in values or variable.path in layers:
                set_initializer(variable, taken(variable.path))

    def check_not_quantized(self, action):
        """Raises ValueError if the model is quantised, naming an action that would need its full weights."""
        if self.quantization is not None:
            raise ValueError(
                f"The model is quantised ({self.quantization}), and {action} needs full weights: {REMEDY}, to merge "
                f"an adapter into and to save. save_adapter writes an adapter alone."
            )


def quantized_policy(kind, dtype, stored):
    """The policy of a model to be quantised while it is loaded.

    Args:
        kind: name of the kind of quantisation.
        dtype: of `from_pretrained`: the policy that says in what is computed.
        stored: dtype of the checkpoint's other tensors, if they have one in common. Where it is half precision, so
            are the variables: of a frozen base they need no more.

    Raises:
        ValueError: for a dtype that is quantised already, and on a mesh of TensorFlow's for kinds of fewer than 8 bits.
    """
    if on_dtensor() and kind != "int8":
        raise ValueError(
            f"quantization={kind!r} does not work on a TensorFlow mesh, whose DTensor lacks operations on bits: take "
            f"'int8' there, or the JAX backend."
        )
    policy = keras.dtype_policies.get(dtype or keras.config.dtype_policy())
    if isinstance(policy, QuantizedBasePolicy) or policy.quantization_mode is not None:
        raise ValueError(f"dtype={policy!r} is quantised already; give quantization={kind!r} a policy that is not.")
    half = [dtype for dtype in (policy.variable_dtype, stored) if dtype in _HALF]
    return QuantizedBasePolicy(kind, policy.name, half[0] if half else policy.variable_dtype)
