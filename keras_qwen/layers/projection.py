"""The one way in which layers of this package make their linear projections."""

import keras

from keras_qwen.layers.lora import Adaptable
from keras_qwen.layers.quantized_policy import quantization_of
from keras_qwen.ops.placement import product
from keras_qwen.ops.product_of_made import product_of_made
from keras_qwen.ops.row_matmul import row_matmul


class Projection(Adaptable, keras.layers.Dense):
    """A `keras.layers.Dense` that is fast at the single rows of decoding, and can be adapted with `LoRA`.

    Call arguments:
        inputs: tensor (..., inputs).
        made_by, made_from: a function and a tuple of tensors that the inputs are the value of, if it is cheap: for
            their gradients kernels and adapters have the inputs computed again then, and do not keep them.

    Whatever needs the kernel asks `base_product`, `full_kernel` or `replace_kernel` for it.
    """

    weight_name = "kernel"

    def call(self, inputs, made_by=None, made_from=(), training=None):
        adapter = self.adapter
        if adapter is not None:
            outputs = adapter.product(inputs, self.base_product, training, made_by, made_from)
        elif training and made_by is not None and self._trains_kernel() and keras.distribution.distribution() is None:
            outputs = product_of_made(inputs, keras.ops.convert_to_tensor(self.kernel), made_by, made_from)
        else:
            outputs = self.base_product(inputs)
        return outputs if self.bias is None else outputs + self.bias

    def base_product(self, inputs):
        """`inputs @ kernel`: all that the layer computes with its kernel, however that is kept."""
        return product(row_matmul, inputs, self.kernel)

    def _trains_kernel(self):
        # Of a frozen one, which may be kept in another form, there is no gradient that would keep the inputs.
        return any(variable.name == self.weight_name for variable in self.trainable_variables)


def build_projection(parent, name, units, input_shape, *, use_bias, kernel_initializer):
    """A built `Projection`, quantised if the parent's dtype policy says so, with an initialiser (and seed) of its own.

    Args:
        parent: the layer that the projection belongs to; its `build` must be running.
        name: layer name, Hugging Face's module name.
        units: output size.
        input_shape: shape of the projection's input, its last dimension known.
    """
    if isinstance(kernel_initializer, keras.initializers.Initializer):
        kernel_initializer = kernel_initializer.clone()  # one object would give every kernel the same values
    layer = Projection
    if quantization_of(parent.dtype_policy) is not None:
        from keras_qwen.layers.quantized_projection import QuantizedProjection as layer  # it is a Projection itself
    dense = layer(units, use_bias=use_bias, kernel_initializer=kernel_initializer, dtype=parent.dtype_policy, name=name)
    dense.build(input_shape)
    return dense
