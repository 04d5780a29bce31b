"""Matrices in few bits: error bounds, NF4's levels and scales, packing, and what is refused."""

import keras
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from keras_qwen.ops import quantization as module
from keras_qwen.ops.quantization import KINDS, Quantized, kind_named, quantize
from keras_qwen.ops.quantization_nf4 import LEVELS
from keras_qwen.ops.quantization_packing import GROUP, pack, unpack

RNG = np.random.default_rng(0)


def parts_of(kind, matrix):
    quantized = Quantized(kind, *matrix.shape)
    return quantized, quantize(quantized, lambda start, stop: matrix[:, start:stop])


def there_and_back(kind, matrix):
    quantized, parts = parts_of(kind, matrix)
    tensors = {name: keras.ops.convert_to_tensor(part) for name, part in parts.items()}
    return keras.ops.convert_to_numpy(quantized.dequantize(tensors))


def groups_of(matrix):
    """Slices of rows that share a scale, and those rows."""
    return [matrix[start : start + GROUP] for start in range(0, len(matrix), GROUP)]


def worst(kind, group):
    """How far each column's entries of a group may be off."""
    if kind == "int8":
        return np.abs(group).max(0) / 127 * 0.51
    if kind == "int4":
        scale = (np.maximum(group.max(0), 0) - np.minimum(group.min(0), 0)) / 15
        return 0.57 * scale  # a half, by which the zero point may shift the ends, and the rounding of the scale
    largest = np.abs(group).max(0)
    widest = np.diff(LEVELS).max() / 2
    return widest * largest * 1.01 + (largest.max() - largest.min()) / 255


@st.composite
def matrices(draw):
    inputs, outputs = draw(st.integers(1, 200)), draw(st.integers(1, 20))
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    matrix = rng.normal(draw(st.floats(-2, 2)), draw(st.floats(0, 1)), (inputs, outputs))
    matrix *= 10.0 ** rng.integers(-3, 3, outputs)
    return matrix.astype("float32")


@pytest.mark.parametrize("kind", KINDS)
@given(matrix=matrices())
@example(matrix=np.zeros((70, 3), "float32"))
@example(matrix=np.full((70, 3), 0.5, "float32"))
@example(matrix=np.full((1, 1), -1e-3, "float32"))
@settings(max_examples=30)
def test_every_entry_is_within_half_a_step(kind, matrix):
    back = there_and_back(kind, matrix)
    assert back.shape == matrix.shape and back.dtype == np.float32
    groups = [matrix] if kind == "int8" else groups_of(matrix)
    bounds = np.concatenate([np.broadcast_to(worst(kind, group), group.shape) for group in groups])
    assert (np.abs(back - matrix) <= bounds + 1e-7).all()


@pytest.mark.parametrize(("kind", "error", "bits"), [("int8", 0.011, 8.1), ("int4", 0.11, 4.5), ("nf4", 0.1, 4.25)])
def test_error_and_bits_on_normal_weights(kind, error, bits):
    matrix = (RNG.normal(size=(896, 512)) * 0.02).astype("float32")
    back = there_and_back(kind, matrix)
    assert np.sqrt(np.mean((back - matrix) ** 2) / np.mean(matrix**2)) < error
    quantized, parts = parts_of(kind, matrix)
    assert 8 * quantized.nbytes / matrix.size <= bits
    assert quantized.nbytes == sum(part.nbytes for part in parts.values())
    assert kind_named(kind).bits == pytest.approx(8 * quantized.nbytes / matrix.size, rel=0.01)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(64, 256), (65, 257), (1, 1), (63, 3), (130, 600)])
def test_parts_have_the_announced_shapes_and_dtypes(kind, shape):
    quantized, parts = parts_of(kind, RNG.normal(size=shape).astype("float32"))
    assert {n: (p.shape, str(p.dtype)) for n, p in parts.items()} == {
        n: (p.shape, p.dtype) for n, p in quantized.parts.items()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_give_the_same_as_the_whole(kind, monkeypatch):
    matrix = RNG.normal(size=(100, 700)).astype("float32")
    _, whole = parts_of(kind, matrix)
    monkeypatch.setattr(module, "_PIECE_BYTES", 1)
    _, pieces = parts_of(kind, matrix)
    for name, part in whole.items():
        np.testing.assert_array_equal(part, pieces[name])


@pytest.mark.parametrize("kind", KINDS)
def test_values_on_the_grid_come_back_exactly(kind):
    if kind == "nf4":
        group = np.resize(LEVELS, 64)
        matrix = np.stack([group, -group[::-1], group], axis=1)[:, [0, 2]] * np.float32(0.25)
    elif kind == "int4":
        matrix = np.stack([np.resize(np.arange(-5, 11), 64), np.resize(np.arange(16), 64)], axis=1) * np.float32(0.5)
    else:
        matrix = np.stack([np.arange(-127, 128), np.arange(-127, 128)], axis=1) * np.float32(1)
    np.testing.assert_allclose(there_and_back(kind, matrix.astype("float32")), matrix, rtol=1e-6, atol=1e-6)


def test_nf4_has_the_published_levels():
    # Dettmers et al., 2023, appendix E.
    published = (
        "-1.0 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635 -0.18477343022823334 "
        "-0.09105003625154495 0.0 0.07958029955625534 0.16093020141124725 0.24611230194568634 0.33791524171829224 "
        "0.44070982933044434 0.5626170039176941 0.7229568362236023 1.0"
    )
    np.testing.assert_allclose(LEVELS, np.array(published.split(), "float64"), atol=1e-6)


def test_nf4_takes_the_nearest_level():
    column = np.linspace(-1, 1, 64, dtype="float32")
    back = there_and_back("nf4", column[:, None])[:, 0]
    nearest = LEVELS[np.abs(column[:, None] - LEVELS).argmin(1)]
    np.testing.assert_allclose(back, nearest, atol=1e-6)


def test_double_quantisation_of_scales():
    """Scales come back within half a step of 1/255 of the range of their run of 256 columns."""
    matrix = RNG.normal(size=(128, 600)).astype("float32") * np.geomspace(0.01, 3, 600, dtype="float32")
    _, parts = parts_of("nf4", matrix)
    scale = np.repeat(parts["scale_low"], 256, 1)[:, :600] + parts["scale_code"] * np.repeat(
        parts["scale_step"], 256, 1
    )[:, :600].astype("float32")
    largest = np.abs(matrix.reshape(2, 64, 600)).max(1)
    for run in (slice(0, 256), slice(256, 512), slice(512, 600)):
        spread = np.ptp(largest[:, run], axis=1, keepdims=True)
        assert (np.abs(scale - largest)[:, run] <= spread / 255 * 0.501 + 1e-7).all()
    assert parts["scale_code"].min() == 0 and parts["scale_code"].max() == 255


def test_an_outlier_costs_only_its_own_group():
    matrix = (RNG.normal(size=(256, 4)) * 0.02).astype("float32")
    matrix[70, 1] = 5
    for kind in ("int4", "nf4"):
        back = there_and_back(kind, matrix)
        others = np.delete(np.arange(256), np.arange(64, 128))
        assert np.abs(back - matrix)[others].max() < 0.02, kind


@given(st.integers(1, 3), st.integers(1, 5), st.integers(0, 100))
@settings(max_examples=20)
def test_packing_inverts(groups, columns, seed):
    codes = np.random.default_rng(seed).integers(0, 16, (groups, GROUP, columns)).astype("uint8")
    packed = pack(codes)
    assert packed.shape == (groups * GROUP // 2, columns) and packed.dtype == np.uint8
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(unpack(keras.ops.convert_to_tensor(packed))), codes)


def test_int4_chooses_codes_for_the_rounded_scale():
    matrix = RNG.normal(size=(64, 300)).astype("float32")
    _, parts = parts_of("int4", matrix)
    assert parts["scale"].dtype == ml_dtypes.bfloat16
    scale, zero = parts["scale"].astype("float32"), parts["zero_point"].astype("float32")
    ideal = np.clip(np.rint(matrix / scale) + zero, 0, 15)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(unpack(parts["codes"]))[0], ideal)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_not_finite_weights_are_refused(kind, value):
    matrix = np.ones((70, 5), "float32")
    matrix[66, 3] = value
    quantized = Quantized(kind, 70, 5)
    with pytest.raises(ValueError, match="q_proj holds NaN or infinity"):
        quantize(quantized, lambda start, stop: matrix[:, start:stop], "q_proj")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1e-30, 1e-6, 1e6, 1e37])
def test_very_small_and_very_large_weights(kind, size):
    if kind == "int8" and size < 1e-5:
        return  # Keras's quantiser adds 1e-7 to the largest, so that such a column loses bits, or becomes 0
    matrix = np.full((64, 2), size, "float32")
    matrix[::2] = -size
    np.testing.assert_allclose(there_and_back(kind, matrix), matrix, rtol=0.08)


@pytest.mark.parametrize("name", ["int2", "NF4", None, 4, ["int4"]])
def test_an_unknown_kind_names_the_known(name):
    with pytest.raises(ValueError, match="known are 'int8', 'int4', 'nf4'"):
        kind_named(name)


def test_temporary_memory_is_bounded():
    """Quantising takes no second copy of the matrix: what it holds at a time are pieces."""
    import tracemalloc

    matrix = np.ones((1024, 8192), ml_dtypes.bfloat16)
    for kind in KINDS:
        quantized = Quantized(kind, *matrix.shape)
        tracemalloc.start()
        quantize(quantized, lambda start, stop: matrix[:, start:stop])
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < quantized.nbytes + 4 * 12 * module._PIECE_BYTES < 4 * matrix.size * 4, kind
