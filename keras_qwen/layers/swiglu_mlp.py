"""SwiGLUMLP."""

from functools import partial

import keras

from keras_qwen.layers.projection import build_projection
from keras_qwen.ops.elementwise import swiglu
from keras_qwen.ops.placement import placed


@keras.saving.register_keras_serializable(package="keras_qwen")
class SwiGLUMLP(keras.layers.Layer):
    """Gated feed-forward network: `down_proj(silu(gate_proj(x)) * up_proj(x))`, without biases.

    Args:
        intermediate_size: size of the gated layer.
        kernel_initializer: initialiser of the three kernels.

    Call arguments:
        hidden: tensor (..., hidden_size).

    Returns:
        Tensor of the same shape.

    Example:
        >>> SwiGLUMLP(intermediate_size=32)(keras.ops.ones((2, 3, 8))).shape
        (2, 3, 8)

    Reference: Shazeer, 2020, "GLU Variants Improve Transformer", arXiv:2002.05202, equation 6.
    """

    def __init__(self, intermediate_size, kernel_initializer="glorot_uniform", **kwargs):
        super().__init__(**kwargs)
        self.intermediate_size = intermediate_size
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.supports_masking = True

    def build(self, input_shape):
        make = partial(build_projection, self, use_bias=False, kernel_initializer=self.kernel_initializer)
        self.gate_proj = make("gate_proj", self.intermediate_size, input_shape)
        self.up_proj = make("up_proj", self.intermediate_size, input_shape)
        self.down_proj = make("down_proj", input_shape[-1], (*input_shape[:-1], self.intermediate_size))

    def call(self, hidden, training=None):
        axes = ("batch", "length", "mlp")[3 - len(hidden.shape) :]
        gate, up = (placed(project(hidden), *axes) for project in (self.gate_proj, self.up_proj))
        return self.down_proj(swiglu(gate, up), made_by=swiglu, made_from=(gate, up))

    def compute_output_shape(self, hidden_shape):
        return hidden_shape

    def get_config(self):
        return {
            **super().get_config(),
            "intermediate_size": self.intermediate_size,
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
        }
