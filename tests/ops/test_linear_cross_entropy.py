"""linear_cross_entropy: value, right tokens and gradients against numpy in float64."""

import keras
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_qwen.ops import linear_cross_entropy

TOKENS, HIDDEN, VOCAB = 11, 6, 23
RNG = np.random.default_rng(0)
STATES = RNG.normal(size=(TOKENS, HIDDEN)).astype("float32")
KERNEL = RNG.normal(size=(HIDDEN, VOCAB)).astype("float32")
LABELS = RNG.integers(0, VOCAB, TOKENS).astype("int32")
WEIGHTS = np.array([1, 0, 2, 0.5, 0, 0, 1, 1, 1, 0, 3], "float32")


def reference(states, kernel, labels, weights, cotangent=1.0):
    """Loss sum, right sum, and the gradients of cotangent * loss sum."""
    states, kernel, weights = (np.asarray(x, "float64") for x in (states, kernel, weights))
    weights = np.where(labels < 0, 0.0, weights)
    labels = np.maximum(labels, 0)
    logits = states @ kernel
    logits -= logits.max(-1, keepdims=True)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    rows = np.arange(len(labels))
    loss = -(np.log(p[rows, labels]) * weights).sum()
    right = ((logits.argmax(-1) == labels) * weights).sum()
    slopes = p.copy()
    slopes[rows, labels] -= 1
    slopes *= weights[:, None] * cotangent
    return loss, right, slopes @ kernel.T, states.T @ slopes


def gradients(function, *arrays):
    """Value and gradients of a scalar function of arrays, on the backend that Keras runs on."""
    backend = keras.backend.backend()
    tensors = [keras.ops.convert_to_tensor(a) for a in arrays]
    if backend == "jax":
        import jax

        value, found = jax.value_and_grad(function, argnums=tuple(range(len(arrays))))(*tensors)
    else:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            tape.watch(tensors)
            value = function(*tensors)
        found = tape.gradient(value, tensors)
    return float(value), [None if g is None else np.asarray(g).astype("float64") for g in found]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("chunk_size", [None, 1, 4, 11])
def test_value_and_gradients(transposed, chunk_size):
    loss, right, d_states, d_kernel = reference(STATES, KERNEL, LABELS, WEIGHTS, cotangent=0.25)
    kernel = KERNEL.T.copy() if transposed else KERNEL

    def function(states, kernel):
        sums = linear_cross_entropy(states, kernel, LABELS, WEIGHTS, transposed=transposed, chunk_size=chunk_size)
        return sums.loss_sum * 0.25

    value, (found_states, found_kernel) = gradients(function, STATES, kernel)
    assert value == pytest.approx(loss * 0.25, rel=1e-5)
    np.testing.assert_allclose(found_states, d_states, atol=6e-6)
    np.testing.assert_allclose(found_kernel, d_kernel.T if transposed else d_kernel, atol=6e-6)
    sums = linear_cross_entropy(STATES, kernel, LABELS, WEIGHTS, transposed=transposed, training=False)
    assert float(sums.loss_sum) == pytest.approx(loss, rel=1e-5)
    assert float(sums.correct_sum) == pytest.approx(right, rel=1e-5)
    assert float(sums.weight_sum) == pytest.approx(WEIGHTS.sum())
    assert float(sums.loss) == pytest.approx(loss / WEIGHTS.sum(), rel=1e-5)


def test_negative_labels_and_all_zero_weights():
    masked = np.where(WEIGHTS > 0, LABELS, -100)
    with_labels = linear_cross_entropy(STATES, KERNEL, masked)
    with_weights = linear_cross_entropy(STATES, KERNEL, LABELS, (WEIGHTS > 0).astype("float32"))
    assert float(with_labels.loss) == pytest.approx(float(with_weights.loss), rel=1e-6)
    value, found = gradients(lambda s, k: linear_cross_entropy(s, k, LABELS, WEIGHTS * 0).loss, STATES, KERNEL)
    assert value == 0.0 and all((g == 0).all() for g in found)


def test_frozen_kernel_has_no_gradient():
    _, _, d_states, _ = reference(STATES, KERNEL, LABELS, WEIGHTS)
    kernel = keras.ops.convert_to_tensor(KERNEL)
    value, (found,) = gradients(
        lambda s: linear_cross_entropy(s, kernel, LABELS, WEIGHTS, kernel_trainable=False).loss_sum, STATES
    )
    np.testing.assert_allclose(found, d_states, atol=6e-6)


def test_bfloat16_sums_in_float32():
    half = STATES.astype(ml_dtypes.bfloat16)
    loss, _, d_states, d_kernel = reference(half.astype("float32"), KERNEL.astype(ml_dtypes.bfloat16), LABELS, WEIGHTS)
    value, (found_states, found_kernel) = gradients(
        lambda s, k: linear_cross_entropy(s, k, LABELS, WEIGHTS, chunk_size=3).loss_sum, half, KERNEL
    )
    assert value == pytest.approx(loss, rel=2e-2)
    for found, expected in ((found_states, d_states), (found_kernel, d_kernel)):
        assert np.linalg.norm(found - expected) < 3e-2 * np.linalg.norm(expected)


@settings(max_examples=15, deadline=None)
@given(st.integers(1, TOKENS), st.integers(0, 2**31))
def test_chunks_change_nothing(chunk_size, seed):
    weights = np.random.default_rng(seed).integers(0, 3, TOKENS).astype("float32")
    whole = linear_cross_entropy(STATES, KERNEL, LABELS, weights, training=False)
    parts = linear_cross_entropy(STATES, KERNEL, LABELS, weights, chunk_size=chunk_size, training=False)
    for a, b in zip(whole, parts, strict=True):
        assert float(a) == pytest.approx(float(b), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(chunk_size=0), "chunk_size"),
        (dict(chunk_size=TOKENS + 1), "chunk_size"),
        (dict(labels=LABELS + VOCAB), "vocab"),
        (dict(labels=LABELS[:5]), "labels"),
        (dict(kernel=KERNEL.T.copy()), "hidden"),
        (dict(weights=WEIGHTS[:5]), "weights"),
    ],
)
def test_bad_input(change, words):
    arguments = dict(hidden=STATES, kernel=KERNEL, labels=LABELS, weights=WEIGHTS) | change
    with pytest.raises(ValueError, match=words):
        linear_cross_entropy(**arguments)
