"""What attention needs of JAX; `attention_backend` says what each function does."""

import functools

import jax
import jax.numpy as jnp
import keras

from keras_qwen.ops.attention_mask import attention_mask


def device():
    distribution = keras.distribution.distribution()
    if distribution is None:
        return jax.default_backend()
    first = distribution.device_mesh.devices.flat[0]  # a name such as "gpu:0", or JAX's own device
    return first.split(":")[0] if isinstance(first, str) else first.platform


def matmul_float32(left, right, transpose_left=False, transpose_right=False):
    contracted = (2 if transpose_left else 3,), (3 if transpose_right else 2,)
    dimensions = contracted, ((0, 1), (0, 1))
    return jax.lax.dot_general(left, right, dimensions, preferred_element_type=jnp.float32)


def softmax(scores):
    return jax.nn.softmax(scores)


def call_with_gradient(forward, backward, settings, inputs, constants):
    return _caller(forward, backward)(settings, inputs, constants)


@functools.lru_cache
def _caller(forward, backward):
    def save(settings, inputs, constants):
        output, saved = forward(settings, inputs, constants)
        return output, (inputs, constants, saved)

    def gradient(settings, residuals, output_gradient):
        return backward(settings, *residuals, output_gradient), None

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def call(settings, inputs, constants):
        return forward(settings, inputs, constants)[0]

    # Compiled once for each setting and shape; without that, an eager call would compile its loops every time.
    jit = functools.partial(jax.jit, static_argnums=0)
    call.defvjp(jit(save), jit(gradient))
    return jit(call)


def slice_block(tensor, index, size):
    block = jax.lax.dynamic_slice_in_dim(_as_bits(tensor), index * size, size, axis=1)
    return jax.lax.bitcast_convert_type(block, tensor.dtype)


def _as_bits(tensor):
    """Half precision as integers: XLA for the CPU would widen the whole tensor to take or change a part of it."""
    return jax.lax.bitcast_convert_type(tensor, jnp.uint16) if tensor.dtype.itemsize == 2 else tensor


def zero_blocks(count, shape, dtype="float32"):
    return jnp.zeros((count, *shape), dtype)


def read_block(blocks, index):
    return blocks[index]


def write_block(blocks, index, values):
    changed = jax.lax.dynamic_update_index_in_dim(_as_bits(blocks), _as_bits(values), index, axis=0)
    return jax.lax.bitcast_convert_type(changed, blocks.dtype)


def stack_blocks(blocks):
    return blocks


def has_fused_kernel():
    capability = str(getattr(jax.local_devices()[0], "compute_capability", "8.0"))  # none: planning for another machine
    return capability.replace(".", "").isdecimal() and float(capability) >= 8.0


def flash_attention(query, key, value, *, segment_ids, sliding_window, causal, scale):
    if device() == "tpu":
        output = _splash_attention(query, key, value, segment_ids, sliding_window, causal, scale)
    else:
        output = _cudnn_attention(query, key, value, segment_ids, sliding_window, causal, scale)
    return output if segment_ids is None else jnp.where((segment_ids > 0)[:, :, None, None], output, 0)


def _cudnn_attention(query, key, value, segment_ids, sliding_window, causal, scale):
    # The kernel knows causality and a causal window, the rest only as a (length, length) mask without heads. In it,
    # padding sees padding: a row that sees nothing would divide by zero.
    mask, window = None, None if sliding_window is None else (sliding_window - 1, 0)
    if segment_ids is not None or not (causal or window is None):
        segment_ids = None if segment_ids is None else segment_ids + 1
        mask, window = attention_mask(segment_ids, query.shape[1], sliding_window, causal)[:, None], None
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        mask=mask,
        scale=scale,
        is_causal=causal,
        local_window_size=window,
        implementation="cudnn",
    )


def _splash_attention(query, key, value, segment_ids, sliding_window, causal, scale, interpret=False):
    # Keras's way to this kernel takes neither grouped heads nor segments.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    shape = query.shape[1], key.shape[1]
    window = None if sliding_window is None else sliding_window - 1
    if causal and window is None:
        mask = splash.CausalMask(shape)
    elif window is None:
        mask = splash.FullMask(shape)
    else:
        mask = splash.LocalMask(shape, (window, 0 if causal else None), 0)
    kernel = splash.make_splash_mha_single_device(splash.MultiHeadMask([mask] * query.shape[2]), interpret=interpret)
    query = (query.astype(jnp.float32) * scale).astype(query.dtype)  # the scale itself would round in half precision
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    segments = None if segment_ids is None else splash.SegmentIds(segment_ids, segment_ids)
    return jnp.swapaxes(jax.vmap(kernel)(query, key, value, segments), 1, 2)
