"""Rotary tables against their formulas in float64."""

import math

import keras
import numpy as np
import pytest

from keras_qwen.layers.rotary_embedding import RotaryEmbedding, apply_rotary_embedding

D = 16
POSITIONS = np.array([[0, 1, 5, 900, 31]])
PLAIN = 10000.0 ** -(np.arange(0, D, 2) / D)


def tables(rope_parameters=None, positions=POSITIONS, **arguments):
    layer = RotaryEmbedding(D, rope_parameters=rope_parameters, **arguments)
    return [keras.ops.convert_to_numpy(t).astype("float64") for t in layer(positions)]


def check(found, frequencies, factor=1.0, positions=POSITIONS):
    angles = positions[..., None] * frequencies
    np.testing.assert_allclose(found[0], np.cos(angles) * factor, atol=2e-4)
    np.testing.assert_allclose(found[1], np.sin(angles) * factor, atol=2e-4)


def test_default():
    check(tables(), PLAIN)
    check(tables(rope_theta=500.0), 500.0 ** -(np.arange(0, D, 2) / D))
    check(tables({"rope_theta": 500.0}), 500.0 ** -(np.arange(0, D, 2) / D))


def test_linear():
    check(tables({"type": "linear", "factor": 4.0}), PLAIN / 4)


@pytest.mark.parametrize("longest", [20, 64, 100, 400])
def test_dynamic_ntk(longest):
    """The base grows with the longest position, beyond the original length only."""
    positions = np.array([[0, 3, longest - 1]])
    found = tables({"rope_type": "dynamic", "factor": 2.0}, positions, max_position_embeddings=64)
    length = max(longest, 64)
    base = 10000.0 * (2.0 * length / 64 - 1.0) ** (D / (D - 2))
    check(found, base ** -(np.arange(0, D, 2) / D), positions=positions)


def test_yarn():
    settings = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    turns = lambda t: D * math.log(128 / (t * 2 * math.pi)) / (2 * math.log(10000.0))  # noqa: E731
    low, high = max(math.floor(turns(32)), 0), min(math.ceil(turns(1)), D - 1)
    ramp = np.clip((np.arange(D // 2) - low) / (high - low), 0, 1)
    check(tables(settings), PLAIN / 4 * ramp + PLAIN * (1 - ramp), 0.1 * math.log(4.0) + 1)
    check(tables(settings | {"attention_factor": 1.5}), PLAIN / 4 * ramp + PLAIN * (1 - ramp), 1.5)
    both = settings | {"mscale": 2.0, "mscale_all_dim": 0.5}
    factor = (0.2 * math.log(4.0) + 1) / (0.05 * math.log(4.0) + 1)
    check(tables(both), PLAIN / 4 * ramp + PLAIN * (1 - ramp), factor)


def test_llama3():
    settings = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    expected = []
    for frequency in PLAIN:
        wavelength = 2 * math.pi / frequency
        if wavelength < 64 / 4.0:
            expected.append(frequency)
        elif wavelength > 64 / 1.0:
            expected.append(frequency / 8)
        else:
            smooth = (64 / wavelength - 1.0) / (4.0 - 1.0)
            expected.append((1 - smooth) * frequency / 8 + smooth * frequency)
    check(tables(settings), np.array(expected))


def test_rotation_keeps_lengths_and_depends_on_distance_only():
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 1, 1, 1, D)).astype("float32")

    def product(i, j):
        layer = RotaryEmbedding(D)
        turned = [apply_rotary_embedding(x, *layer(np.array([[p]]))) for x, p in ((q, i), (k, j))]
        a, b = (keras.ops.convert_to_numpy(t) for t in turned)
        np.testing.assert_allclose(np.linalg.norm(a), np.linalg.norm(q), rtol=1e-5)
        return float((a * b).sum())

    assert product(7, 3) == pytest.approx(product(104, 100), abs=1e-4)
    assert product(7, 3) != pytest.approx(product(8, 3), abs=1e-3)


def test_angles_are_float32_under_half_precision():
    layer = RotaryEmbedding(D, dtype="float32")
    assert keras.backend.standardize_dtype(layer(POSITIONS)[0].dtype) == "float32"
    keras.config.set_dtype_policy("bfloat16")
    try:
        half = RotaryEmbedding(D)
        assert keras.backend.standardize_dtype(half(POSITIONS)[0].dtype) == "float32"
        check([keras.ops.convert_to_numpy(t) for t in half(POSITIONS)], PLAIN)
    finally:
        keras.config.set_dtype_policy("float32")


def test_config_round_trip():
    layer = RotaryEmbedding(D, rope_parameters={"type": "linear", "factor": 4.0}, rope_theta=77.0, name="r")
    again = RotaryEmbedding.from_config(layer.get_config())
    for a, b in zip(layer(POSITIONS), again(POSITIONS), strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(a), keras.ops.convert_to_numpy(b))


def test_errors():
    with pytest.raises(ValueError, match="head_dim is 7"):
        RotaryEmbedding(7)
    with pytest.raises(ValueError, match="rope_type 'longrope'"):
        RotaryEmbedding(D, rope_parameters={"rope_type": "longrope"})
