"""Attention and its gradients in numpy's float64, and the way to get the same numbers from `attention`."""

import functools

import keras
import numpy as np

from keras_qwen.ops import attention

SEGMENTS = np.array([[0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 3], [1] * 6 + [2] * 4 + [0] * 3], "int32")


def inputs(batch=2, length=13, heads=6, kv_heads=2, head_dim=4, key_length=None, seed=0):
    """Query, key, value and a gradient of the output."""
    rng = np.random.default_rng(seed)
    key_length = key_length or length
    shapes = [(length, heads), (key_length, kv_heads), (key_length, kv_heads), (length, heads)]
    return [rng.normal(size=(batch, *shape, head_dim)).astype("float32") for shape in shapes]


def visible(length, segments=None, window=None, causal=True):
    """Which key each query sees, (batch or 1, length, length)."""
    mask = np.zeros((1 if segments is None else len(segments), length, length), bool)
    for row, i, j in np.ndindex(mask.shape):
        same = segments is None or segments[row, i] == segments[row, j] > 0
        mask[row, i, j] = same and (j <= i or not causal) and (window is None or j > i - window)
    return mask


def reference(query, key, value, gradient, mask):
    """The output, and the gradients of query, key and value for `gradient`, that of the output."""
    q, k, v, d_out = (x.astype("float64") for x in (query, key, value, gradient))
    groups, scale, mask = q.shape[2] // k.shape[2], q.shape[-1] ** -0.5, mask[:, None]
    k, v = np.repeat(k, groups, 2), np.repeat(v, groups, 2)
    scores = np.where(mask, np.einsum("bqhd,bkhd->bhqk", q, k) * scale, -1e30)
    p = np.exp(scores - scores.max(-1, keepdims=True)) * mask
    p /= np.maximum(p.sum(-1, keepdims=True), 1e-300)
    d_p = np.einsum("bqhd,bkhd->bhqk", d_out, v)
    d_s = p * (d_p - (p * d_p).sum(-1, keepdims=True)) * scale
    d_k, d_v = np.einsum("bhqk,bqhd->bkhd", d_s, q), np.einsum("bhqk,bqhd->bkhd", p, d_out)
    d_k, d_v = (x.reshape(*x.shape[:2], -1, groups, x.shape[-1]).sum(3) for x in (d_k, d_v))
    return np.einsum("bhqk,bkhd->bqhd", p, v), np.einsum("bhqk,bkhd->bqhd", d_s, k), d_k, d_v


def run(arrays, segment_ids=None, mask=None, dtype="float32", **arguments):
    """What `reference` returns, from `attention`, in float32."""
    tensors = [keras.ops.cast(keras.ops.convert_to_tensor(x), dtype) for x in arrays]
    found = _compiled(tuple(arguments.items()))(*tensors, segment_ids, mask)
    assert keras.backend.standardize_dtype(found[0].dtype) == dtype
    return [keras.ops.convert_to_numpy(keras.ops.cast(x, "float32")) for x in found]


@functools.cache
def _compiled(arguments):
    """One function for each set of arguments, so that a shape is compiled once in all tests."""

    def call(query, key, value, segment_ids, mask):
        return attention(query, key, value, segment_ids=segment_ids, mask=mask, **dict(arguments))

    if keras.backend.backend() == "jax":
        import jax

        @jax.jit
        def run_jax(query, key, value, gradient, segment_ids, mask):
            output, pull = jax.vjp(lambda *x: call(*x, segment_ids, mask), query, key, value)
            return output, *pull(gradient)

        return run_jax

    if keras.backend.backend() == "torch":
        import torch

        def run_torch(query, key, value, gradient, segment_ids, mask):
            tensors = [x.detach().requires_grad_() for x in (query, key, value)]
            output = call(*tensors, segment_ids, mask)
            return output.detach(), *torch.autograd.grad(output, tensors, gradient)

        return run_torch

    import tensorflow as tf

    @tf.function(autograph=False)
    def run_tensorflow(query, key, value, gradient, segment_ids, mask):
        with tf.GradientTape() as tape:
            tape.watch([query, key, value])
            output = call(query, key, value, segment_ids, mask)
        return output, *tape.gradient(output, [query, key, value], output_gradients=gradient)

    def convert(*tensors):
        return run_tensorflow(*(None if x is None else tf.convert_to_tensor(x) for x in tensors))

    return convert


def assert_close(found, expected, atol=1e-5):
    for name, a, b in zip(("output", "query", "key", "value"), found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=atol, rtol=0, err_msg=f"{name} (gradients are named by their tensor)")
