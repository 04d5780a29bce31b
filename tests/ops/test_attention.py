"""attention: every implementation against numpy in float64, values and gradients."""

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_qwen.ops import attention

RNG = np.random.default_rng(0)


def inputs(batch=2, length=13, heads=6, kv_heads=2, head_dim=4):
    shapes = [(batch, length, n, head_dim) for n in (heads, kv_heads, kv_heads)]
    return [RNG.normal(size=shape).astype("float32") for shape in shapes]


def visible(segments, length, window):
    i, j = np.arange(length)[:, None], np.arange(length)[None]
    mask = (i >= j) & (j > i - (window or length))
    if segments is None:
        return mask[None]
    return mask & (segments[:, :, None] == segments[:, None]) & (segments[:, :, None] > 0)


def reference(query, key, value, segments=None, window=None):
    """Output and the gradients of sum(output ** 2) / 2."""
    q, k, v = (x.astype("float64") for x in (query, key, value))
    groups = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, groups, 2), np.repeat(v, groups, 2)
    mask = visible(segments, q.shape[1], window)[:, None]
    scores = np.where(mask, np.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5, -1e30)
    p = np.exp(scores - scores.max(-1, keepdims=True)) * mask
    p /= np.maximum(p.sum(-1, keepdims=True), 1e-300)
    out = np.einsum("bhqk,bkhd->bqhd", p, v)
    d_v = np.einsum("bhqk,bqhd->bkhd", p, out)
    d_p = np.einsum("bqhd,bkhd->bhqk", out, v)
    d_s = p * (d_p - (p * d_p).sum(-1, keepdims=True)) * q.shape[-1] ** -0.5
    d_q, d_k = np.einsum("bhqk,bkhd->bqhd", d_s, k), np.einsum("bhqk,bqhd->bkhd", d_s, q)
    fold = lambda x: x.reshape(*x.shape[:2], -1, groups, x.shape[-1]).sum(3)  # noqa: E731
    return out, d_q, fold(d_k), fold(d_v)


def run(arrays, **arguments):
    tensors = [keras.ops.convert_to_tensor(a) for a in arrays]
    if keras.backend.backend() == "jax":
        import jax

        out, pull = jax.vjp(lambda *t: attention(*t, **arguments), *tensors)
        found = [out, *pull(out)]
    else:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            tape.watch(tensors)
            out = attention(*tensors, **arguments)
        found = [out, *tape.gradient(out, tensors, output_gradients=out)]
    return [keras.ops.convert_to_numpy(x) for x in found]


SEGMENTS = np.array([[1] * 5 + [2] * 6 + [0] * 2, [0] * 3 + [1] * 10], "int32")


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["plain", "segments"])
@pytest.mark.parametrize("heads", [(6, 2), (7, 1), (3, 3)])
def test_values_and_gradients(implementation, window, segments, heads):
    arrays = inputs(heads=heads[0], kv_heads=heads[1])
    more = {"block_size": 4} if implementation == "blockwise" else {}
    found = run(arrays, segment_ids=segments, sliding_window=window, implementation=implementation, **more)
    expected = reference(*arrays, segments, window)
    real = slice(None) if segments is None else segments > 0
    np.testing.assert_allclose(found[0][real], expected[0][real], atol=1e-5)
    for a, b in zip(found[1:], expected[1:], strict=True):
        np.testing.assert_allclose(a, b, atol=3e-5)


def test_padding_is_finite_with_no_gradient():
    arrays = inputs()
    for implementation in ("dense", "blockwise"):
        out, *grads = run(arrays, segment_ids=np.zeros((2, 13), "int32"), implementation=implementation)
        assert (out == 0).all() and all((g == 0).all() for g in grads)


@settings(max_examples=6, deadline=None)
@given(st.integers(1, 20), st.integers(1, 8), st.integers(1, 8), st.one_of(st.none(), st.integers(1, 9)), st.data())
def test_blockwise_equals_dense(length, q_block, k_block, window, data):
    segments = np.array([data.draw(st.lists(st.integers(0, 2), min_size=length, max_size=length))], "int32")
    segments = np.sort(segments, axis=1)
    arrays = inputs(batch=1, length=length)
    sizes = (min(q_block, length), min(k_block, length))
    dense = run(arrays, segment_ids=segments, sliding_window=window, implementation="dense")
    blocks = run(arrays, segment_ids=segments, sliding_window=window, implementation="blockwise", block_size=sizes)
    for a, b in zip(dense, blocks, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_excluded_blocks_are_not_computed():
    """NaN in keys that no query may see stays there."""
    query, key, value = inputs(batch=1, length=16)
    key[:, :4] = np.nan
    out = run([query, key, value], sliding_window=4, implementation="blockwise", block_size=4)[0]
    assert np.isfinite(out[:, 8:]).all() and np.isnan(out[:, :4]).any()


def test_mask_for_decoding():
    query, key, value = inputs(length=9)
    whole = reference(query, key, value)[0]
    mask = np.tril(np.ones((9, 9), bool))[None, 6:]
    found = run([query[:, 6:], key, value], mask=mask)[0]
    np.testing.assert_allclose(found, whole[:, 6:], atol=1e-5)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (dict(implementation="fast"), "known are auto, dense, blockwise, flash"),
        (dict(implementation="flash"), "No flash attention here"),
        (dict(implementation="blockwise", dropout=0.1), "dense form only"),
        (dict(sliding_window=0), "sliding_window"),
        (dict(segment_ids=np.ones((2, 5), "int32")), "segment_ids must have the shape"),
        (dict(implementation="blockwise", block_size=0), "block_size"),
    ],
)
def test_bad_input(arguments, words):
    with pytest.raises(ValueError, match=words):
        attention(*inputs(), **arguments)
