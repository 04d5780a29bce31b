"""The one way in which layers of this package make their linear projections."""

import keras


def build_projection(parent, name, units, input_shape, *, use_bias, kernel_initializer):
    """A built `keras.layers.Dense` under the parent's dtype policy, with an initialiser (and seed) of its own.

    Args:
        parent: the layer that the projection belongs to; its `build` must be running.
        name: layer name, Hugging Face's module name.
        units: output size.
        input_shape: shape of the projection's input, its last dimension known.
    """
    if isinstance(kernel_initializer, keras.initializers.Initializer):
        kernel_initializer = kernel_initializer.clone()  # one object would give every kernel the same values
    dense = keras.layers.Dense(
        units, use_bias=use_bias, kernel_initializer=kernel_initializer, dtype=parent.dtype_policy, name=name
    )
    dense.build(input_shape)
    return dense
