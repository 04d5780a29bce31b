"""RMSNorm."""

import keras
from keras import ops

from keras_qwen.ops.elementwise import rms_norm


@keras.saving.register_keras_serializable(package="keras_qwen")
class RMSNorm(keras.layers.Layer):
    """Root mean square normalisation over the last dimension, with a learnt scale and no shift.

    Computes `x / sqrt(mean(x ** 2) + eps)` in float32 under every dtype policy, casts to the compute dtype, then
    multiplies by `scale`, in the order of the reference implementation.

    Args:
        eps: added to the mean square; `rms_norm_eps` of a config.

    Call arguments:
        inputs: tensor (..., dimension).

    Returns:
        Tensor of the inputs' shape, in the layer's compute dtype.

    Example:
        >>> RMSNorm(eps=1e-6)(keras.ops.ones((2, 3, 8))).shape
        (2, 3, 8)

    Reference: Zhang and Sennrich, 2019, "Root Mean Square Layer Normalization", arXiv:1910.07467, equation 4.
    """

    def __init__(self, eps=1e-6, **kwargs):
        super().__init__(**kwargs)
        if not eps > 0:
            raise ValueError(f"eps must be positive, not {eps!r}.")
        self.eps = eps
        self.supports_masking = True

    def build(self, input_shape):
        self.scale = self.add_weight(name="scale", shape=(input_shape[-1],), initializer="ones")

    def call(self, inputs):
        return rms_norm(inputs, ops.cast(self.scale, self.compute_dtype), self.eps)

    def compute_output_shape(self, input_shape):
        return input_shape

    def get_config(self):
        return {**super().get_config(), "eps": self.eps}
