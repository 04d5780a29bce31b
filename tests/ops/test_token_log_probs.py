"""token_log_probs: values and gradients against numpy in float64, in every form of the loop."""

import importlib

import keras
import numpy as np
import pytest

from keras_qwen.ops import token_log_probs

BACKEND = keras.backend.backend()
TOKENS, HIDDEN, VOCAB = 11, 6, 24
RNG = np.random.default_rng(0)
STATES = RNG.normal(size=(TOKENS, HIDDEN)).astype("float32")
KERNEL = RNG.normal(size=(HIDDEN, VOCAB)).astype("float32")
LABELS = RNG.integers(0, VOCAB, TOKENS).astype("int32")
MASK = np.array([1, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1])
COTANGENT = RNG.normal(size=TOKENS).astype("float32")


@pytest.fixture(params=[1, 6])
def pieces(request, monkeypatch):
    """The vocabulary is taken in so many pieces, as a large one is."""
    module = importlib.import_module("keras_qwen.ops.linear_cross_entropy")
    monkeypatch.setattr(module, "PIECE_BYTES", 4 * HIDDEN * VOCAB // request.param)


def reference(mask, labels=LABELS):
    states, kernel = STATES.astype("float64"), KERNEL.astype("float64")
    logits = states @ kernel
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    rows, counts = np.arange(TOKENS), (mask != 0) & (labels >= 0)
    values = np.where(counts, np.log(p[rows, np.maximum(labels, 0)]), 0)
    slopes = -p
    slopes[rows, np.maximum(labels, 0)] += 1
    slopes *= (COTANGENT * counts)[:, None]
    return values, slopes @ kernel.T, states.T @ slopes


def call(states, kernel, mask, **options):
    return token_log_probs(states, kernel, LABELS, mask, **options)


def values_and_gradients(function, *arrays):
    """Value, and the gradients of `sum(COTANGENT * value)`."""
    tensors = [keras.ops.convert_to_tensor(a) for a in arrays]
    if BACKEND == "jax":
        import jax

        value, back = jax.vjp(jax.jit(function), *tensors)
        return np.asarray(value), [np.asarray(g) for g in back(COTANGENT)]
    if BACKEND == "tensorflow":
        import tensorflow as tf

        @tf.function
        def run(*tensors):
            with tf.GradientTape() as tape:
                tape.watch(tensors)
                value = function(*tensors)
            return value, tape.gradient(value, tensors, output_gradients=tf.constant(COTANGENT))

        value, found = run(*tensors)
        return value.numpy(), [g.numpy() for g in found]
    tensors = [t.requires_grad_() for t in tensors]
    value = function(*tensors)
    value.backward(keras.ops.convert_to_tensor(COTANGENT))
    return value.detach().numpy(), [t.grad.numpy() for t in tensors]


@pytest.mark.parametrize("chunk_size", [None, 1, 4, 11])
@pytest.mark.parametrize("mask", [np.ones(TOKENS), MASK], ids=["all", "some"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.usefixtures("pieces")
def test_values_and_gradients(chunk_size, mask, transposed):
    options = dict(chunk_size=chunk_size, transposed=transposed)
    kernel = KERNEL.T if transposed else KERNEL
    value, of_states, of_kernel = reference(mask)
    found, gradients = values_and_gradients(lambda s, k: call(s, k, mask, **options), STATES, kernel)
    np.testing.assert_allclose(found, value, atol=2e-6)
    np.testing.assert_allclose(gradients[0], of_states, atol=5e-6)
    np.testing.assert_allclose(gradients[1], of_kernel.T if transposed else of_kernel, atol=1e-5)

    frozen = lambda s: call(s, kernel, mask, kernel_trainable=False, **options)  # noqa: E731
    found, gradients = values_and_gradients(frozen, STATES)
    np.testing.assert_allclose(found, value, atol=2e-6)
    np.testing.assert_allclose(gradients[0], of_states, atol=5e-6)

    alone = keras.ops.convert_to_numpy(call(STATES, kernel, mask, training=False, **options))
    np.testing.assert_allclose(alone, value, atol=2e-6)


def test_dimensions_and_negative_labels():
    labels = np.where(np.arange(12) % 4 == 1, -100, np.append(LABELS, 3)).reshape(3, 4)
    states = np.concatenate([STATES, STATES[:1]]).reshape(3, 4, HIDDEN)
    found = keras.ops.convert_to_numpy(token_log_probs(states, KERNEL, labels, training=False))
    assert found.shape == (3, 4)
    value, *_ = reference(np.ones(TOKENS), labels.reshape(-1)[:TOKENS])
    np.testing.assert_allclose(found.reshape(-1)[:TOKENS], value, atol=2e-6)
    assert (found.reshape(-1)[1::4] == 0).all()


def test_half_precision():
    states = keras.ops.cast(STATES, "bfloat16")
    found = keras.ops.convert_to_numpy(call(states, KERNEL, None, training=False))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, reference(np.ones(TOKENS))[0], atol=0.1)


def test_no_position_counts():
    found, gradients = values_and_gradients(lambda s, k: call(s, k, np.zeros(TOKENS)), STATES, KERNEL)
    np.testing.assert_array_equal(found, 0)
    assert all((g == 0).all() for g in gradients)


def test_wrong_shapes():
    with pytest.raises(ValueError, match="weights|labels"):
        call(STATES, KERNEL, np.ones(3))
    with pytest.raises(ValueError, match="vocabulary"):
        token_log_probs(STATES, KERNEL, np.full(TOKENS, VOCAB))
