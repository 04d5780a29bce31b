"""QuantizedProjection: a projection whose kernel is kept in few bits."""

import keras
from keras import ops

from keras_qwen.layers.projection import Projection
from keras_qwen.ops.quantization import Quantized
from keras_qwen.ops.quantized_matmul import dequantize, quantized_matmul

REMEDY = "model.dequantize() gives a model with full weights"


class QuantizedProjection(Projection):
    """A `Projection` whose kernel is quantised, frozen, and dequantised each time it is multiplied with.

    Its kernel is 0 until a checkpoint is read into it. Adapters work on it; merging them needs the full kernel.

    Args:
        dtype: a `QuantizedBasePolicy`, which says how.
        **kwargs: of `keras.layers.Dense`.
    """

    def build(self, input_shape):
        self.quantized = Quantized(self.dtype_policy.quantization, input_shape[-1], self.units)
        self.parts = {
            name: self.add_weight(
                name=f"kernel_{name}",
                shape=part.shape,
                dtype=part.dtype,
                initializer="zeros",
                trainable=False,
                autocast=False,
            )
            for name, part in self.quantized.parts.items()
        }
        bias = dict(shape=(self.units,), initializer=self.bias_initializer)
        self.bias = self.add_weight(name="bias", **bias) if self.use_bias else None
        self.input_spec = keras.layers.InputSpec(min_ndim=2, axes={-1: input_shape[-1]})
        self.built = True

    def base_product(self, inputs):
        return quantized_matmul(inputs, self.quantized, self._tensors())

    def full_kernel(self):
        """The kernel that is computed with, as a float32 tensor."""
        return dequantize(self.quantized, self._tensors())

    kernel = property(full_kernel)

    def replace_kernel(self, value):
        raise ValueError(f"{self.path} is quantised ({self.quantized.kind}) and cannot take full weights: {REMEDY}.")

    def quantize(self, *args, **kwargs):
        raise ValueError(f"{self.path} is quantised ({self.quantized.kind}) already.")

    def _tensors(self):
        return {name: ops.stop_gradient(part) for name, part in self.parts.items()}

    # Dense's own look for a kernel.

    def save_own_variables(self, store):
        keras.layers.Layer.save_own_variables(self, store)

    def load_own_variables(self, store):
        keras.layers.Layer.load_own_variables(self, store)
