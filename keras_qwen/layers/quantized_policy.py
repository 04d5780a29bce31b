"""QuantizedBasePolicy: the dtype policy of a model whose projections are kept in few bits."""

import keras

from keras_qwen.ops.quantization import kind_named


@keras.saving.register_keras_serializable(package="keras_qwen")
class QuantizedBasePolicy(keras.dtype_policies.DTypePolicy):
    """Computes as another policy does, with quantised projections and everything else in a dtype of its own.

    A frozen base has no use for float32 copies of what a checkpoint stores in bfloat16.

    Args:
        quantization: `"int8"`, `"int4"` or `"nf4"`.
        name: the policy whose compute dtype this one has, and whose name.
        variable_dtype: of embeddings, norms, biases and an untied head.

    Raises:
        ValueError: for an unknown quantization.

    Example:
        >>> QuantizedBasePolicy("nf4", "mixed_bfloat16", "bfloat16").compute_dtype
        'bfloat16'
    """

    def __init__(self, quantization, name=None, variable_dtype="bfloat16"):
        super().__init__(name)
        self.quantization = kind_named(quantization).name
        self._variable_dtype = keras.backend.standardize_dtype(variable_dtype)

    def get_config(self):
        return {
            "quantization": self.quantization,
            "name": self.name,
            "variable_dtype": self.variable_dtype,
        }

    def __eq__(self, other):
        return type(other) is type(self) and other.get_config() == self.get_config()

    def __hash__(self):
        return hash(tuple(self.get_config().items()))

    def __repr__(self):
        return f'<QuantizedBasePolicy "{self.name}", {self.quantization} projections, {self.variable_dtype} variables>'


def quantization_of(policy):
    """The kind of quantisation of a dtype policy: a name, or None."""
    return policy.quantization if isinstance(policy, QuantizedBasePolicy) else None
