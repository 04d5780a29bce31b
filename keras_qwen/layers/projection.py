"""The one way in which layers of this package make their linear projections."""

import keras

from keras_qwen.ops.row_matmul import row_matmul


class Projection(keras.layers.Dense):
    """A `keras.layers.Dense` that is fast at the single rows of decoding."""

    def call(self, inputs, training=None):
        outputs = self.base_product(inputs)
        return outputs if self.bias is None else outputs + self.bias

    def base_product(self, inputs):
        """`inputs @ kernel`: all that the layer computes with its kernel, however that is kept."""
        return row_matmul(inputs, self.kernel)

    def full_kernel(self):
        """The kernel (inputs, units) as one array in the variables' dtype, however it is kept."""
        return self.kernel


def build_projection(parent, name, units, input_shape, *, use_bias, kernel_initializer):
    """A built `Projection` under the parent's dtype policy, with an initialiser (and seed) of its own.

    Args:
        parent: the layer that the projection belongs to; its `build` must be running.
        name: layer name, Hugging Face's module name.
        units: output size.
        input_shape: shape of the projection's input, its last dimension known.
    """
    if isinstance(kernel_initializer, keras.initializers.Initializer):
        kernel_initializer = kernel_initializer.clone()  # one object would give every kernel the same values
    dense = Projection(
        units, use_bias=use_bias, kernel_initializer=kernel_initializer, dtype=parent.dtype_policy, name=name
    )
    dense.build(input_shape)
    return dense
