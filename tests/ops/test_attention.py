"""attention: every implementation against numpy in float64, values and gradients; what it refuses."""

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import ops

from keras_qwen.ops import attention
from keras_qwen.ops.attention_mask import attention_mask

from .attention_reference import SEGMENTS, assert_close, inputs, reference, run, visible

BLOCKS = {"dense": None, "blockwise": (4, 3)}  # neither size divides the length
if keras.backend.backend() == "torch":
    BLOCKS["flash"] = None


@pytest.mark.parametrize("implementation", BLOCKS)
@pytest.mark.parametrize(
    "heads, segments, window, causal",
    [
        ((14, 2), SEGMENTS, None, True),
        ((6, 2), SEGMENTS, 4, True),
        ((6, 2), None, 1, True),
        ((3, 3), None, None, True),
        ((7, 1), None, None, False),
        ((3, 3), SEGMENTS, 3, False),
    ],
)
def test_values_and_gradients(implementation, heads, segments, window, causal):
    arrays = inputs(heads=heads[0], kv_heads=heads[1])
    found = run(
        arrays,
        segments,
        sliding_window=window,
        causal=causal,
        implementation=implementation,
        block_size=BLOCKS[implementation],
    )
    assert_close(found, reference(*arrays, visible(13, segments, window, causal)))


@pytest.mark.parametrize("implementation", BLOCKS)
def test_rows_of_padding_alone_are_zero_without_gradient(implementation):
    arrays = inputs()
    segments = SEGMENTS * np.array([[1], [0]], "int32")
    found = run(arrays, segments, implementation=implementation, block_size=BLOCKS[implementation])
    assert all(np.isfinite(x).all() and (x[1] == 0).all() and (x[0] != 0).any() for x in found)
    assert (found[0][0, :3] == 0).all()


@pytest.mark.parametrize("implementation", BLOCKS)
def test_half_precision(implementation):
    arrays = [keras.ops.convert_to_numpy(ops.cast(ops.cast(x, "bfloat16"), "float32")) for x in inputs(head_dim=8)]
    block_size = BLOCKS[implementation]
    found = run(arrays, SEGMENTS, dtype="bfloat16", implementation=implementation, block_size=block_size)
    assert_close(found, reference(*arrays, visible(13, SEGMENTS)), atol=0.06)  # of values up to 8


def test_one_token():
    arrays = inputs(length=1)
    for implementation in BLOCKS:
        assert_close(run(arrays, implementation=implementation), reference(*arrays, np.ones((1, 1, 1), bool)))


# A few forms, each compiled once, so that there is time for many segmentations.
FORMS = [(5, (3, 2), None), (5, (1, 5), 2), (12, (4, 4), 5), (12, (5, 3), None), (12, (3, 8), 1)]


@settings(max_examples=40)
@given(st.sampled_from(FORMS), st.integers(0, 2**16), st.data())
def test_blockwise_equals_dense(form, seed, data):
    length, block_size, window = form
    segments = data.draw(st.lists(st.integers(0, 3), min_size=2 * length, max_size=2 * length))
    segments = np.array(segments, "int32").reshape(2, length)  # in any order: a document may even have a gap
    if data.draw(st.booleans()):
        segments.sort(axis=1)
    arrays = inputs(length=length, heads=4, seed=seed)
    dense = run(arrays, segments, sliding_window=window, implementation="dense")
    blocks = run(arrays, segments, sliding_window=window, implementation="blockwise", block_size=block_size)
    assert_close(blocks, dense)


@pytest.mark.parametrize("implementation", BLOCKS)
def test_documents_do_not_see_each_other(implementation):
    arguments = dict(implementation=implementation, block_size=BLOCKS[implementation])
    arrays = inputs()
    before = run(arrays, SEGMENTS, **arguments)
    changed = [np.where((SEGMENTS == 2)[..., None, None], x + 1, x) for x in arrays]
    after = run(changed, SEGMENTS, **arguments)
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a[SEGMENTS != 2], b[SEGMENTS != 2])


def test_a_packed_document_is_the_document_alone():
    arrays = inputs()
    packed = run(arrays, SEGMENTS, implementation="dense", block_size=None)
    alone = run([x[:1, 3:7] for x in arrays], implementation="dense", block_size=None)
    assert_close(alone, [x[:1, 3:7] for x in packed])


def test_mask_for_decoding():
    query, key, value, gradient = inputs(length=2, key_length=9)
    mask = np.zeros((2, 2, 9), bool)
    mask[0, :, 2:6] = mask[1, 1, :8] = True  # and a row that sees nothing
    assert_close(run([query, key, value, gradient], mask=mask), reference(query, key, value, gradient, mask))


def test_other_keys_than_queries():
    query, key, value, gradient = inputs(length=4, key_length=9)
    everything = np.ones((1, 4, 9), bool)
    for arguments in (dict(implementation="dense"), dict(implementation="blockwise", block_size=(3, 4))):
        found = run([query, key, value, gradient], causal=False, **arguments)
        assert_close(found, reference(query, key, value, gradient, everything))
    segments, key_segments = SEGMENTS[:, 4:8], SEGMENTS[:, 2:11]
    mask = (segments[:, :, None] == key_segments[:, None]) & (segments[:, :, None] > 0)
    arguments = dict(segment_ids=segments, key_segment_ids=key_segments, causal=False, implementation="blockwise")
    output = attention(query, key, value, **arguments, block_size=(3, 4))
    expected = reference(query, key, value, gradient, mask)[0]
    np.testing.assert_allclose(ops.convert_to_numpy(output), expected, atol=1e-5)


def test_dropout():
    query, key, value, _ = inputs(length=40, heads=2)
    value = np.ones_like(value)

    def mean(seed):  # of each row's kept probabilities, scaled up by those dropped
        return ops.convert_to_numpy(attention(query, key, value, dropout=0.25, seed=seed))[:, 20:, :, 0]

    assert np.array_equal(mean(1), mean(1)) and not np.array_equal(mean(1), mean(2))
    assert 0.9 < mean(1).mean() < 1.1 and mean(1).std() > 0.01
    generator = keras.random.SeedGenerator(3)
    drawn = keras.random.SeedGenerator(3).next()
    np.testing.assert_array_equal(mean(generator), mean(drawn))
    assert not np.array_equal(mean(generator), mean(drawn)), "the generator has moved on"


def test_attention_mask():
    expected = visible(13, SEGMENTS, 3)
    np.testing.assert_array_equal(ops.convert_to_numpy(attention_mask(SEGMENTS, sliding_window=3)), expected)
    assert tuple(attention_mask(length=5).shape) == (1, 5, 5)
    np.testing.assert_array_equal(ops.convert_to_numpy(attention_mask(None, 5, causal=False)), np.ones((1, 5, 5), bool))
    with pytest.raises(ValueError, match="segment_ids or length"):
        attention_mask()


def shapes(**changes):
    arrays = dict(zip(("query", "key", "value"), inputs(), strict=False))
    return {**arrays, **{name: np.zeros(shape, "float32") for name, shape in changes.items()}}


@pytest.mark.parametrize(
    "arguments, words",
    [
        (dict(implementation="fast"), "known are auto, dense, blockwise, flash"),
        pytest.param(
            dict(implementation="flash"),
            "No flash attention here: .*Available are auto, dense and blockwise",
            marks=pytest.mark.skipif(keras.backend.backend() == "torch", reason="torch has it"),
        ),
        (dict(implementation="blockwise", dropout=0.1), "dense form only"),
        (dict(implementation="flash", mask=np.ones((1, 13, 13), bool)), "dense form only"),
        (dict(sliding_window=0), "sliding_window must be 1 or more"),
        (dict(dropout=1.0), "dropout must be in"),
        (dict(segment_ids=np.ones((2, 5), "int32")), r"segment_ids must have the shape \(2, 13\)"),
        (dict(key_segment_ids=SEGMENTS), "needs segment_ids"),
        (dict(mask=np.ones((3, 13, 13), bool)), "mask must have the shape"),
        (dict(implementation="blockwise", block_size=0), "block_size must be a positive integer"),
        (dict(implementation="blockwise", block_size=(4, 4, 4)), "a pair of them"),
        (dict(implementation="blockwise", block_size=14), "block_size 14 is beyond the length 13"),
        (shapes(query=(2, 13, 24)), "takes tensors"),
        (shapes(query=(2, 13, 5, 4)), "5 query heads are no multiple of 2"),
        (shapes(query=(2, 13, 6, 5)), "same batch and head_dim"),
        (shapes(value=(2, 12, 2, 4)), "the same length and heads"),
        (shapes(query=(2, 3, 6, 4)), "3 queries and 13 keys"),
        (dict(value=np.zeros((2, 13, 2, 4), "float16")), "different dtypes"),
    ],
)
def test_bad_input(arguments, words):
    with pytest.raises(ValueError, match=words):
        attention(**{**shapes(), **arguments})
