"""A change of low rank to a product, whose backward pass keeps and copies nothing large that it does not need."""

from keras import ops

from keras_qwen.ops.recompute import add_product, after, lean, no_gradients, together


def add_low_rank(y, x, a, b, scale, made_by=None, made_from=()):
    """`y + scale * (x a) b`.

    The backward pass keeps x and the small product, and multiplies in an order where only small arrays are transposed.

    Args:
        y: tensor (..., m).
        x: tensor (..., n).
        a: tensor (n, r).
        b: tensor (r, m).
        scale: float.
        made_by, made_from: a function and a tuple of tensors that x is the value of: the backward pass computes x
            again, and does not keep it.

    Returns:
        Tensor (..., m).

    Example:
        >>> x = keras.ops.ones((2, 3, 8))
        >>> add_low_rank(x, x, keras.ops.ones((8, 1)), keras.ops.ones((1, 8)), 0.5)[0, 0, 0]
        5.0
    """
    return lean(lambda *tensors: _add_low_rank(scale, made_by, *tensors))(y, x, a, b, *made_from)


def _add_low_rank(scale, made_by, y, x, a, b, *made_from):
    rows = ops.reshape(x, (-1, x.shape[-1]))
    low = ops.matmul(rows, a) * scale
    total = add_product(ops.reshape(y, (-1, b.shape[1])), low, b)

    def backward(of_y):
        slopes = ops.reshape(of_y, (-1, b.shape[1]))
        of_low = ops.matmul(slopes, ops.transpose(b)) * scale
        again = rows if made_by is None else ops.reshape(made_by(*after(of_y, *made_from)), (-1, a.shape[0]))
        of_a = ops.transpose(ops.matmul(ops.transpose(of_low), again))
        of_b = ops.matmul(ops.transpose(low), slopes)
        of_x = ops.reshape(ops.matmul(of_low, ops.transpose(a)), ops.shape(y)[:-1] + (a.shape[0],))
        # An accelerator's scheduler would else put off the two small gradients of all layers, and keep what they need.
        of_x, of_a, of_b = together(of_x, of_a, of_b)
        return of_y, of_x, of_a, of_b, *no_gradients(*made_from)

    return ops.reshape(total, ops.shape(y)), backward
