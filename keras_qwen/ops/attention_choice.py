"""Which implementation of attention to use, and with blocks of what size."""

import math
import numbers

import keras

from keras_qwen.ops.attention_backend import backend_module
from keras_qwen.ops.placement import on_dtensor

IMPLEMENTATIONS = ("auto", "dense", "blockwise", "flash")

# Up to this length the whole score matrix takes no more time than its blocks do, and less to compile.
DENSE_LENGTH = 256

# How many scores a pair of blocks has, all heads together; on a CPU, what stays in its cache.
SCORES = {"cpu": 2**19, "gpu": 2**24, "tpu": 2**24}
BLOCK_SIZES = 64, 512


def choose_implementation(
    *,
    implementation="auto",
    length=None,
    key_length=None,
    dtype="float32",
    head_dim=None,
    has_mask=False,
    has_key_segments=False,
    dropout=0.0,
    backend=None,
    device=None,
):
    """The implementation that `attention` uses for such a call.

    Args:
        implementation: what was asked for; "auto" leaves the choice open.
        length, key_length: of queries and keys, `None` where they are not known before the call.
        dtype: of the tensors.
        head_dim: size of a head, `None` for one that suits every kernel.
        has_mask, has_key_segments, dropout: as given to `attention`.
        backend: "jax", "tensorflow" or "torch"; default: the one that Keras runs on.
        device: "cpu", "gpu" or "tpu"; default: the one that it computes on.

    Returns:
        "dense", "blockwise" or "flash".

    Raises:
        ValueError: an unknown implementation, or one that cannot do what is asked for.

    Example:
        >>> choose_implementation(length=8192, backend="tensorflow", device="gpu")
        'blockwise'
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"Unknown attention implementation {implementation!r}; known are {', '.join(IMPLEMENTATIONS)}."
        )
    backend = backend or keras.backend.backend()
    needs_dense = "an explicit mask" if has_mask else "dropout" if dropout else None
    if needs_dense:
        if implementation in ("blockwise", "flash"):
            raise ValueError(f"Attention with {needs_dense} is there in dense form only, not as {implementation!r}.")
        return "dense"
    if backend == "tensorflow" and on_dtensor():
        if implementation in ("blockwise", "flash"):
            raise ValueError(f"On TensorFlow's meshes attention is there in dense form only, not {implementation!r}.")
        return "dense"
    device = device or backend_module().device()
    no_flash = _why_no_flash(backend, device, dtype, head_dim, length, has_key_segments)
    if implementation == "flash" and no_flash:
        raise ValueError(f"No flash attention here: {no_flash}. Available are auto, dense and blockwise.")
    if implementation != "auto":
        return implementation
    short = length is not None and max(length, key_length or length) <= DENSE_LENGTH
    if not no_flash and (backend == "torch" or not short):
        return "flash"
    return "dense" if short else "blockwise"


def _why_no_flash(backend, device, dtype, head_dim, length, has_key_segments):
    """What is missing for a fused kernel, or None."""
    if has_key_segments:
        return "the fused kernels take no segments of the keys alone"
    if backend == "torch":
        return None
    if backend == "tensorflow":
        return "TensorFlow has no fused attention kernel"
    if device == "tpu":
        if length is None or length % 128:
            return f"on a TPU the length has to be a multiple of 128, not {length}"
        return None
    if device != "gpu":
        return f"JAX has no fused attention kernel for the {device.upper()}"
    dtype = keras.backend.standardize_dtype(dtype)
    if dtype not in ("float16", "bfloat16"):
        return f"cuDNN's kernel takes float16 and bfloat16, not {dtype}"
    if head_dim is not None and (head_dim % 8 or head_dim > 128):
        return f"cuDNN's kernel takes a head_dim that is a multiple of 8 up to 128, not {head_dim}"
    if length is None or length % 2:
        return f"cuDNN's kernel takes an even length, not {length}"
    if keras.backend.backend() == "jax" and not backend_module().has_fused_kernel():
        return "cuDNN's kernel needs an NVIDIA GPU of compute capability 8.0 or later"
    return None


def choose_block_sizes(block_size, query_shape, key_length, device=None):
    """Tokens in a block of queries and in one of keys.

    Args:
        block_size: what was asked for: an integer, a pair, or `None` for a choice by device and shape.
        query_shape: (batch, length, heads, head_dim), `None` where not known.
        key_length: number of keys, or `None`.
        device: as in `choose_implementation`.

    Returns:
        A pair of integers.

    Raises:
        ValueError: a size that is no positive integer, or beyond the length.
    """
    batch, length, heads, _ = query_shape
    if block_size is not None:
        sizes = (block_size, block_size) if isinstance(block_size, numbers.Integral) else tuple(block_size)
        if len(sizes) != 2 or not all(isinstance(size, numbers.Integral) and size > 0 for size in sizes):
            raise ValueError(f"block_size must be a positive integer or a pair of them, not {block_size!r}.")
        for size, tokens in zip(sizes, (length, key_length), strict=True):
            if tokens is not None and size > max(tokens, 1):
                raise ValueError(f"block_size {size} is beyond the length {tokens}.")
        return sizes
    device = device or backend_module().device()
    scores = SCORES[device] // ((batch or 1) * heads)  # of one head
    query_size = _clipped_power(math.isqrt(scores))
    key_size = _clipped_power(scores // query_size)
    step = 16 if device == "cpu" else 128
    return _even_size(query_size, length, step), _even_size(key_size, key_length, step)


def _clipped_power(number):
    """The largest power of two up to `number`, in the range of `BLOCK_SIZES`."""
    lowest, highest = BLOCK_SIZES
    return min(max(2 ** (number.bit_length() - 1), lowest), highest)


def _even_size(size, tokens, step):
    """A block size up to `size` that fills up the last block with as little as possible."""
    if tokens is None:
        return size
    if tokens <= size:
        return max(tokens, 1)
    count = -(-tokens // size)
    return min(size, -(-tokens // (count * step)) * step)
