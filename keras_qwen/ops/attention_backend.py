"""What blockwise attention needs and `keras.ops` does not offer: gradients of our own, and sums kept block by block.

Each function imports the backend that Keras runs on, and no other.
"""

import functools

import keras
from keras import ops


def matmul_float32(left, right, transpose_left=False, transpose_right=False):
    """Product of the last two dimensions of tensors of rank 4, returned in float32.

    Operands in half precision are not widened where the backend allows it. Transposing here makes no copies.
    """
    match keras.backend.backend():
        case "jax":
            import jax
            import jax.numpy as jnp

            contracted = ((2 if transpose_left else 3,), (3 if transpose_right else 2,))
            batch = ((0, 1), (0, 1))
            return jax.lax.dot_general(left, right, (contracted, batch), preferred_element_type=jnp.float32)
        case "tensorflow":
            import tensorflow as tf

            product = tf.matmul(left, right, transpose_a=transpose_left, transpose_b=transpose_right)
            return tf.cast(product, tf.float32)
        case _:
            left = ops.swapaxes(left, 2, 3) if transpose_left else left
            right = ops.swapaxes(right, 2, 3) if transpose_right else right
            return ops.cast(ops.matmul(left, right), "float32")


def call_with_gradient(forward, backward, settings, inputs, constants):
    """Calls `forward(settings, inputs, constants)`, with `backward` as its gradient.

    Neither function is differentiated, so that their loops keep no history: what the gradient needs is in `saved`.

    Args:
        forward: module-level function that returns `(output, saved)`.
        backward: module-level function; `backward(settings, inputs, constants, saved, output_gradient)` returns one
            gradient for each of `inputs`.
        settings: hashable; what the functions need and is no tensor.
        inputs: tuple of floating-point tensors.
        constants: tuple of tensors without gradient; may contain `None`.

    Returns:
        `output`, one tensor.
    """
    caller = {"jax": _jax_caller, "tensorflow": _tensorflow_caller, "torch": _torch_caller}[keras.backend.backend()]
    return caller(forward, backward)(settings, inputs, constants)


@functools.lru_cache
def _jax_caller(forward, backward):
    import jax

    def save(settings, inputs, constants):
        output, saved = forward(settings, inputs, constants)
        return output, (inputs, constants, saved)

    def gradient(settings, residuals, output_gradient):
        inputs, constants, saved = residuals
        return backward(settings, inputs, constants, saved, output_gradient), None

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def call(settings, inputs, constants):
        return forward(settings, inputs, constants)[0]

    # Compiled once for each setting and shape; without it, an eager call would compile its loops every time.
    jit = functools.partial(jax.jit, static_argnums=0)
    call.defvjp(jit(save), jit(gradient))
    return jit(call)


@functools.lru_cache
def _tensorflow_caller(forward, backward):
    import tensorflow as tf

    def call(settings, inputs, constants):
        @tf.custom_gradient
        def differentiable(*inputs):
            output, saved = forward(settings, inputs, constants)
            return output, lambda gradient: backward(settings, inputs, constants, saved, gradient)

        return differentiable(*inputs)

    return call


@functools.lru_cache
def _torch_caller(forward, backward):
    import torch

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(context, settings, constants, *inputs):
            output, saved = forward(settings, inputs, constants)
            context.save_for_backward(*inputs, *saved)
            context.settings, context.constants, context.count = settings, constants, len(inputs)
            return output

        @staticmethod
        def backward(context, output_gradient):
            tensors = context.saved_tensors
            inputs, saved = tensors[: context.count], tensors[context.count :]
            return None, None, *backward(context.settings, inputs, context.constants, saved, output_gradient)

    return lambda settings, inputs, constants: Differentiable.apply(settings, constants, *inputs)


def zero_blocks(count, shape, dtype="float32"):
    """`count` blocks of zeros, to be read and written one by one inside a loop, and put together at its end."""
    zeros = ops.zeros((count, *shape), dtype=dtype)
    if keras.backend.backend() != "tensorflow":
        return zeros
    import tensorflow as tf

    # Outside XLA, TensorFlow copies a whole tensor to change a part of it; an array's entries it replaces one by one.
    blocks = tf.TensorArray(zeros.dtype, count, element_shape=zeros.shape[1:], clear_after_read=False)
    return blocks.unstack(zeros)


def read_block(blocks, index):
    """Block `index`."""
    return blocks.read(index) if keras.backend.backend() == "tensorflow" else blocks[index]


def write_block(blocks, index, values):
    """Replaces block `index`; the result takes the place of `blocks`, which may have been changed itself."""
    match keras.backend.backend():
        case "tensorflow":
            return blocks.write(index, values)
        case "torch":
            blocks[index] = values
            return blocks
        case _:
            return blocks.at[index].set(values)


def stack_blocks(blocks):
    """The blocks as one tensor (count, ...)."""
    return blocks.stack() if keras.backend.backend() == "tensorflow" else blocks
