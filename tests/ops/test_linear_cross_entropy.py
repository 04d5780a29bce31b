"""linear_cross_entropy: value, right tokens and gradients against numpy in float64, and what it never allocates."""

import importlib
import math

import keras
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_qwen.ops import linear_cross_entropy

from .gradients import BACKEND, gradients

MODULE = importlib.import_module("keras_qwen.ops.linear_cross_entropy")  # the package's attribute is the function
MODES = {"jax": ["eager", "compiled"], "tensorflow": ["eager", "graph", "compiled"], "torch": ["eager"]}[BACKEND]
TOKENS, HIDDEN, VOCAB = 11, 6, 24
RNG = np.random.default_rng(0)
STATES = RNG.normal(size=(TOKENS, HIDDEN)).astype("float32")
KERNEL = RNG.normal(size=(HIDDEN, VOCAB)).astype("float32")
LABELS = RNG.integers(0, VOCAB, TOKENS).astype("int32")
WEIGHTS = np.array([1, 0, 2, 0.5, 0, 0, 1, 1, 1, 0, 3], "float32")


@pytest.fixture
def six_pieces(monkeypatch):
    """The vocabulary is taken in six pieces, as a large one is."""
    monkeypatch.setattr(MODULE, "PIECE_BYTES", 4 * HIDDEN * VOCAB // 6)


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


def close(found, expected, tolerance):
    return np.linalg.norm(found - expected) <= tolerance * np.linalg.norm(expected)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("chunk_size", [None, 1, 4, 11])
def test_value_and_gradients(transposed, chunk_size):
    loss, right, d_states, d_kernel = reference(STATES, KERNEL, LABELS, WEIGHTS, cotangent=0.25)
    kernel = KERNEL.T.copy() if transposed else KERNEL

    def function(states, kernel):
        sums = linear_cross_entropy(states, kernel, LABELS, WEIGHTS, transposed=transposed, chunk_size=chunk_size)
        return sums.loss_sum * 0.25

    value, (found_states, found_kernel) = gradients(function, STATES, kernel)
    assert value == pytest.approx(loss * 0.25, rel=1e-6)
    assert close(found_states, d_states, 1e-6)
    assert close(found_kernel, d_kernel.T if transposed else d_kernel, 1e-6)
    sums = linear_cross_entropy(STATES, kernel, LABELS, WEIGHTS, transposed=transposed, training=False)
    assert float(sums.loss_sum) == pytest.approx(loss, rel=1e-6)
    assert float(sums.correct_sum) == pytest.approx(right, rel=1e-6)
    assert float(sums.weight_sum) == pytest.approx(WEIGHTS.sum())
    assert float(sums.loss) == pytest.approx(loss / WEIGHTS.sum(), rel=1e-6)
    assert float(sums.accuracy) == pytest.approx(right / WEIGHTS.sum(), rel=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("transposed", "cotangent"), [(True, 1.0), (True, 2.0**15), (False, 0.125)])
def test_pieces_of_the_vocabulary(six_pieces, mode, transposed, cotangent):
    loss, right, d_states, d_kernel = reference(STATES, KERNEL, LABELS, WEIGHTS, cotangent)
    kernel = KERNEL.T.copy() if transposed else KERNEL
    states, labels, weights = STATES[None], LABELS[None], WEIGHTS[None]  # (batch, length, ...), as a model calls it

    def function(states, kernel):
        sums = linear_cross_entropy(states, kernel, labels, weights, transposed=transposed, chunk_size=4)
        return sums.loss_sum * cotangent

    value, (found_states, found_kernel) = gradients(function, states, kernel, mode=mode)
    assert value == pytest.approx(loss * cotangent, rel=1e-6)
    assert close(found_states[0], d_states, 1e-6)
    assert close(found_kernel, d_kernel.T if transposed else d_kernel, 1e-6)
    sums = linear_cross_entropy(states, kernel, labels, weights, transposed=transposed, training=False)
    assert [float(sums.loss_sum), float(sums.correct_sum)] == pytest.approx([loss, right], rel=1e-6)


def test_gradients_can_be_asked_for_twice(six_pieces):
    """Nothing that works in place may change what a second backward pass needs."""
    if BACKEND == "jax":
        import jax

        sums = lambda s: linear_cross_entropy(s, KERNEL, LABELS, WEIGHTS).loss_sum  # noqa: E731
        pullback = jax.vjp(sums, STATES)[1]
        first, second = pullback(np.float32(2))[0], pullback(np.float32(2))[0]
    elif BACKEND == "tensorflow":
        import tensorflow as tf

        kernel = tf.constant(KERNEL)
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(kernel)
            value = 2.0 * linear_cross_entropy(STATES, kernel, LABELS, WEIGHTS).loss_sum
        first, second = tape.gradient(value, kernel), tape.gradient(value, kernel)
    else:
        kernel = keras.ops.convert_to_tensor(KERNEL).requires_grad_()
        value = 2.0 * linear_cross_entropy(STATES, kernel, LABELS, WEIGHTS).loss_sum
        value.backward(retain_graph=True)
        first = kernel.grad.clone()
        value.backward()
        second = kernel.grad - first
    np.testing.assert_array_equal(first, second)


def test_negative_labels_and_all_zero_weights():
    masked = np.where(WEIGHTS > 0, LABELS, -100)
    with_labels = linear_cross_entropy(STATES, KERNEL, masked, training=False)
    with_weights = linear_cross_entropy(STATES, KERNEL, LABELS, (WEIGHTS > 0).astype("float32"), training=False)
    assert float(with_labels.loss) == pytest.approx(float(with_weights.loss), rel=1e-6)
    value, found = gradients(lambda s, k: linear_cross_entropy(s, k, LABELS, WEIGHTS * 0).loss, STATES, KERNEL)
    assert value == 0.0 and all((g == 0).all() for g in found)


def test_chunks_without_a_counting_token_are_skipped():
    spoilt = np.where(WEIGHTS[:, None] > 0, STATES, np.nan)  # a chunk that were not skipped would spoil the sums
    loss, _, d_states, d_kernel = reference(STATES, KERNEL, LABELS, WEIGHTS)
    value, (found_states, found_kernel) = gradients(
        lambda s, k: linear_cross_entropy(s, k, LABELS, WEIGHTS, chunk_size=1).loss_sum, spoilt, KERNEL
    )
    assert value == pytest.approx(loss, rel=1e-6)
    assert close(found_states, d_states, 1e-6) and close(found_kernel, d_kernel, 1e-6)


@pytest.mark.parametrize("size", [4 * HIDDEN * VOCAB, 4 * HIDDEN * VOCAB // 6])
def test_of_equal_logits_the_first_is_the_answer(monkeypatch, size):
    monkeypatch.setattr(MODULE, "PIECE_BYTES", size)
    labels = np.arange(TOKENS, dtype="int32")
    sums = linear_cross_entropy(STATES * 0, KERNEL, labels, training=False)
    assert [float(sums.correct_sum), float(sums.loss)] == pytest.approx([1.0, math.log(VOCAB)])
    kernel = np.tile(KERNEL[:, :1], (1, VOCAB)) * np.where(np.arange(VOCAB) % 7 == 5, 2.0, 1.0).astype("float32")
    states = np.tile(KERNEL[:, 0], (TOKENS, 1))  # columns 5, 12 and 19 are the largest, in different pieces
    assert float(linear_cross_entropy(states, kernel, labels + 3, training=False).correct_sum) == 1.0
    assert float(linear_cross_entropy(states, kernel, labels + 12, training=False).correct_sum) == 0.0


def test_frozen_kernel_has_no_gradient(six_pieces):
    _, _, d_states, _ = reference(STATES, KERNEL, LABELS, WEIGHTS)
    kernel = keras.ops.convert_to_tensor(KERNEL)
    value, (found,) = gradients(
        lambda s: linear_cross_entropy(s, kernel, LABELS, WEIGHTS, kernel_trainable=False).loss_sum, STATES
    )
    assert close(found, d_states, 1e-6)


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_half_precision_sums_in_float32(half):
    dtype = ml_dtypes.bfloat16 if half == "bfloat16" else np.float16
    states = STATES.astype(dtype)
    loss, _, d_states, d_kernel = reference(states.astype("float32"), KERNEL.astype(dtype), LABELS, WEIGHTS)
    for kernel in (KERNEL, KERNEL.astype(dtype)):  # a float32 master copy, or half precision throughout
        value, (found_states, found_kernel) = gradients(
            lambda s, k: linear_cross_entropy(s, k, LABELS, WEIGHTS, chunk_size=3).loss_sum, states, kernel
        )
        assert value == pytest.approx(loss, rel=2e-2)
        assert close(found_states, d_states, 3e-2) and close(found_kernel, d_kernel, 3e-2)


@settings(max_examples=10)
@given(st.integers(1, TOKENS), st.integers(0, 2**31))
def test_chunks_change_nothing(chunk_size, seed):
    weights = np.random.default_rng(seed).integers(0, 3, TOKENS).astype("float32")
    function = lambda s, k, size: linear_cross_entropy(s, k, LABELS, weights, chunk_size=size).loss_sum  # noqa: E731
    whole = gradients(lambda s, k: function(s, k, TOKENS), STATES, KERNEL)
    parts = gradients(lambda s, k: function(s, k, chunk_size), STATES, KERNEL)
    assert whole[0] == pytest.approx(parts[0], rel=1e-5, abs=1e-6)
    assert all(close(a, b, 1e-5) for a, b in zip(whole[1], parts[1], strict=True))


@pytest.mark.skipif(BACKEND == "torch", reason="torch always knows the values")
def test_labels_out_of_range_stay_finite_where_they_cannot_be_checked():
    def function(states, kernel, offset):
        labels = LABELS + VOCAB * keras.ops.cast(offset, "int32")
        return linear_cross_entropy(states, kernel, labels, WEIGHTS).loss_sum + 0.0 * offset

    value, found = gradients(function, STATES, KERNEL, np.float32(1), mode="compiled")
    assert math.isfinite(value) and all(np.isfinite(g).all() for g in found)


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(chunk_size=0), "chunk_size"),
        (dict(chunk_size=-1), "chunk_size"),
        (dict(chunk_size=2.0), "chunk_size"),
        (dict(chunk_size=TOKENS + 1), "chunk_size 12 is more than the 11 tokens"),
        (dict(labels=LABELS + VOCAB), "vocab"),
        (dict(labels=LABELS[:5]), "labels"),
        (dict(labels=WEIGHTS), "integers"),
        (dict(kernel=KERNEL.T.copy()), "hidden"),
        (dict(kernel=KERNEL[0]), "two dimensions"),
        (dict(weights=WEIGHTS[:5]), "weights"),
    ],
)
def test_bad_input(change, words):
    arguments = dict(hidden=STATES, kernel=KERNEL, labels=LABELS, weights=WEIGHTS) | change
    with pytest.raises(ValueError, match=words):
        linear_cross_entropy(**arguments)
