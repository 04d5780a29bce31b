"""A product whose backward pass makes the left factor again, from what is kept anyway."""

from keras import ops

from keras_qwen.ops.recompute import after, lean, no_gradients


def product_of_made(x, kernel, made_by, made_from):
    """`x @ kernel` for an x that is cheap to compute: the kernel's gradient does not keep it.

    Args:
        x: tensor (..., n).
        kernel: tensor (n, m).
        made_by, made_from: a function and a tuple of tensors that x is the value of. Their gradients come through x.

    Returns:
        Tensor (..., m).

    Example:
        >>> gate = up = keras.ops.ones((2, 3, 8))
        >>> product_of_made(swiglu(gate, up), keras.ops.ones((8, 4)), swiglu, (gate, up)).shape
        (2, 3, 4)
    """
    return lean(lambda *tensors: _product_of_made(made_by, *tensors))(x, kernel, *made_from)


def _product_of_made(made_by, x, kernel, *made_from):
    inputs, units = kernel.shape

    def backward(of_y):
        slopes = ops.reshape(of_y, (-1, units))
        again = ops.reshape(made_by(*after(of_y, *made_from)), (-1, inputs))
        of_x = ops.reshape(ops.matmul(slopes, ops.transpose(kernel)), ops.shape(x))
        return of_x, ops.matmul(ops.transpose(again), slopes), *no_gradients(*made_from)

    return ops.matmul(x, kernel), backward
