"""LoRA and DoRA on one projection, against the formulas in numpy."""

import keras
import numpy as np
import pytest

from keras_qwen.layers.lora import dropout_seeds, make_lora, make_replacement
from keras_qwen.layers.projection import Projection

RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 5, 12)).astype("float32")
W = RNG.normal(size=(12, 7)).astype("float32")
A, B = RNG.normal(size=(12, 3)).astype("float32"), RNG.normal(size=(3, 7)).astype("float32")
MAGNITUDE = (1 + RNG.uniform(size=7)).astype("float32")


def numpy(x):
    return keras.ops.convert_to_numpy(keras.ops.cast(x, "float32"))


def adapted(*, fresh=False, dtype="float32", scale=0.5, **settings):
    layer = Projection(7, dtype=dtype, name="q_proj")
    layer.build((None, None, 12))
    layer.kernel.assign(W)
    layer.bias.assign(np.arange(7))
    layer.add_adapter("default", make_lora("default", 3, scale, settings.pop("dropout", 0.0), **settings))
    layer.active_adapter = "default"
    if not fresh:
        layer.adapter.A.assign(A)
        layer.adapter.B.assign(B)
        if settings["use_dora"]:
            layer.adapter.magnitude.assign(MAGNITUDE)
    return layer


def changed_kernel(use_dora, scale=0.5):
    kernel = W.astype("float64") + scale * A.astype("float64") @ B
    return kernel * (MAGNITUDE / np.linalg.norm(kernel, axis=0)) if use_dora else kernel


@pytest.mark.parametrize("use_dora", [False, True])
def test_outputs_are_those_of_the_changed_kernel(use_dora):
    layer = adapted(use_dora=use_dora)
    np.testing.assert_allclose(numpy(layer(X)), X @ changed_kernel(use_dora) + np.arange(7), atol=1e-5)
    np.testing.assert_allclose(numpy(layer(X, training=True)), numpy(layer(X)), atol=1e-6)
    layer.active_adapter = None
    np.testing.assert_allclose(numpy(layer(X)), X @ W + np.arange(7), atol=1e-5)


@pytest.mark.parametrize("use_dora", [False, True])
def test_merged_kernel(use_dora):
    layer = adapted(use_dora=use_dora)
    merged = numpy(layer.adapter.merged(layer.full_kernel()))
    np.testing.assert_allclose(merged, changed_kernel(use_dora), atol=2e-6)
    before = layer.replace_kernel(merged)
    np.testing.assert_array_equal(numpy(layer.kernel), merged)
    layer.restore_kernel(before)
    np.testing.assert_array_equal(numpy(layer.kernel), W)


def test_a_fresh_adapter_changes_nothing():
    layer = adapted(fresh=True, use_dora=False)
    found = numpy(layer(X))
    layer.active_adapter = None
    np.testing.assert_array_equal(found, numpy(layer(X)))
    bound = np.abs(numpy(adapted(fresh=True, use_dora=False).adapter.A))
    assert 0.5 / 12**0.5 < bound.max() <= 1 / 12**0.5  # as torch.nn.Linear's
    dora = adapted(fresh=True, use_dora=True)
    np.testing.assert_allclose(numpy(dora.adapter.magnitude), np.linalg.norm(W, axis=0), rtol=1e-6)
    np.testing.assert_allclose(numpy(dora(X)), found, atol=1e-5)


@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "bfloat16", "mixed_float16"])
@pytest.mark.parametrize("use_dora", [False, True])
def test_half_precision_keeps_the_adapter_in_float32(dtype, use_dora):
    layer = adapted(dtype=dtype, use_dora=use_dora)
    assert {v.dtype for v in layer.adapter.weights} == {"float32"}
    output = layer(X)
    assert keras.backend.standardize_dtype(output.dtype) == layer.compute_dtype
    expected = X @ changed_kernel(use_dora) + np.arange(7)
    np.testing.assert_allclose(numpy(output), expected, atol=0.03 * np.abs(expected).max())


@pytest.mark.parametrize("use_dora", [False, True])
def test_gradients_are_those_of_the_formula(use_dora):
    """Against differences, the norm of DoRA held constant; and the frozen kernel has none."""
    layer = adapted(use_dora=use_dora)
    layer.kernel.trainable = layer.bias.trainable = False
    slopes = RNG.normal(size=(2, 5, 7))
    norm = np.linalg.norm(changed_kernel(False), axis=0) if use_dora else 1.0

    def value(values, x):
        kernel = W + 0.5 * values[0] @ values[1]
        return ((x @ (kernel * (values[2] / norm)) if use_dora else x @ kernel) * slopes).sum()

    values = [v.astype("float64") for v in ((A, B, MAGNITUDE) if use_dora else (A, B))]
    expected = []
    for i, v in enumerate(values):
        difference = np.zeros_like(v)
        for place in np.ndindex(v.shape):
            moved = [u.copy() for u in values]
            moved[i][place] += 1e-3
            up = value(moved, X)
            moved[i][place] -= 2e-3
            difference[place] = (up - value(moved, X)) / 2e-3
        expected.append(difference)
    variables = layer.trainable_variables
    assert [v.name for v in variables] == ["A", "B", "magnitude"][: len(values)]
    for found, want in zip(gradients(layer, slopes.astype("float32"), variables), expected, strict=True):
        np.testing.assert_allclose(found, want, atol=2e-4 * np.abs(want).max())


def gradients(layer, slopes, variables):
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        def loss(values):
            with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
                return (layer(X, training=True) * slopes).sum()

        return [np.asarray(g) for g in jax.grad(loss)([v.value for v in variables])]
    if backend == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(X, training=True) * slopes)
        return [g.numpy() for g in tape.gradient(loss, [v.value for v in variables])]
    loss = (layer(X, training=True) * keras.ops.convert_to_tensor(slopes)).sum()
    loss.backward()
    return [v.value.grad.numpy() for v in variables]


@pytest.mark.parametrize("use_dora", [False, True])
def test_dropout_drops_of_the_change_alone(use_dora):
    layer = adapted(use_dora=use_dora, dropout=0.5)
    ones = np.ones((4000, 12), "float32")
    without = ones @ W + np.arange(7)
    full = ones @ changed_kernel(use_dora) + np.arange(7)
    np.testing.assert_allclose(numpy(layer(ones)), full, atol=1e-5)
    dropped = numpy(layer(ones, training=True))
    assert len(np.unique(dropped.round(3), axis=0)) > 1000
    np.testing.assert_allclose(dropped.mean(0), full[0], atol=0.4)  # right on average
    assert np.abs(dropped - without).max() > 0.5


def test_seeds_drawn_before_are_used_again():
    layer = adapted(use_dora=False, dropout=0.5)
    with dropout_seeds([layer], training=True):
        first, second = numpy(layer(X, training=True)), numpy(layer(X, training=True))
    with dropout_seeds([layer], training=True):
        third = numpy(layer(X, training=True))
    np.testing.assert_array_equal(first, second)
    assert (first != third).any()
    assert layer.adapter.seed is None


def test_variables_say_lora_in_their_paths():
    layer = adapted(use_dora=True, dropout=0.1)
    found = [v.path for v in layer.adapter.variables]
    assert "q_proj/lora_default/A" in found
    assert [path for path in found if "/lora_default/" not in path] == []


def test_replacement_is_a_float32_copy():
    layer = Projection(7, use_bias=False, dtype="bfloat16", name="lm_head")
    layer.build((None, None, 12))
    layer.kernel.assign(W)
    layer.add_adapter("default", make_replacement("default"))
    layer.active_adapter = "default"
    copy = layer.current_weight
    assert copy.path == "lm_head/lora_default/kernel" and copy.dtype == "float32"
    np.testing.assert_array_equal(numpy(copy), numpy(layer.kernel))
    copy.assign(W + 1)
    np.testing.assert_allclose(numpy(layer(X)), X @ (W + 1), atol=0.2)
    layer.active_adapter = None
    np.testing.assert_allclose(numpy(layer(X)), X @ W, atol=0.2)


def test_adapters_can_be_removed():
    layer = adapted(use_dora=True)
    count = len(layer.weights)
    layer.add_adapter("other", make_lora("other", 2, 1.0, 0.0, False))
    layer.active_adapter = None
    layer.remove_adapter("default")
    assert count == 6 and [v.path for v in layer.weights][2:] == ["q_proj/lora_other/A", "q_proj/lora_other/B"]
