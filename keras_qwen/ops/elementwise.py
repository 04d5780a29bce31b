"""The gate and the norm of a decoder block, whose backward passes keep their inputs and compute the rest again.

What automatic differentiation keeps of them is, without a compiler that sees through it, several arrays of the size of
the activations: of the gate the sigmoid and both products, of the norm the normalised input in float32.
"""

from keras import ops

from keras_qwen.ops.recompute import after, lean


def swiglu(gate, up):
    """`silu(gate) * up`.

    Args:
        gate, up: tensors of one shape and dtype.

    Returns:
        Tensor of that shape and dtype.

    Reference: Shazeer, 2020, arXiv:2002.05202, equation 6.
    """
    return lean(_swiglu)(gate, up)


def rms_norm(x, scale, eps):
    """`x / sqrt(mean(x ** 2) + eps)` over the last dimension in float32, cast to the scale's dtype, times scale.

    Args:
        x: tensor (..., dimension).
        scale: tensor (dimension,).
        eps: float.

    Returns:
        Tensor of the shape of x and the dtype of scale.

    Reference: Zhang and Sennrich, 2019, arXiv:1910.07467, equation 4.
    """
    return lean(lambda x, scale: _rms_norm(x, scale, eps))(x, scale)


def _swiglu(gate, up):
    def backward(slopes):
        again, up_again = after(slopes, gate, up)
        sigmoid = ops.sigmoid(again)
        silu = again * sigmoid
        return slopes * up_again * (sigmoid + silu * (1 - sigmoid)), slopes * silu

    return ops.silu(gate) * up, backward


def _rms_norm(x, scale, eps):
    def root_and_normalized(x):
        wide = ops.cast(x, "float32")
        root = ops.rsqrt(ops.mean(wide * wide, axis=-1, keepdims=True) + eps)
        return root, wide * root

    def backward(slopes):
        root, normalized = root_and_normalized(*after(slopes, x))
        slopes = ops.cast(slopes, "float32")
        of_scale = ops.sum(ops.reshape(slopes * normalized, (-1, scale.shape[0])), axis=0)
        slopes = slopes * ops.cast(scale, "float32")
        of_x = root * (slopes - normalized * ops.mean(slopes * normalized, axis=-1, keepdims=True))
        return ops.cast(of_x, x.dtype), ops.cast(of_scale, scale.dtype)

    return ops.cast(root_and_normalized(x)[1], scale.dtype) * scale, backward
