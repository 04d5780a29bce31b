"""Positions and segments from the optional inputs."""

import keras
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_qwen.layers.documents import Documents, combine_segments


def run(**inputs):
    segments, positions = Documents()(**{k: np.array(v, "int32") for k, v in inputs.items()})
    return keras.ops.convert_to_numpy(segments), keras.ops.convert_to_numpy(positions)


def test_nothing_given():
    segments, positions = run(token_ids=[[5, 6, 7], [8, 9, 1]])
    assert segments.shape == (2, 0)
    np.testing.assert_array_equal(positions, [[0, 1, 2]])


def test_left_and_right_padding():
    segments, positions = run(token_ids=np.ones((2, 5)), padding_mask=[[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]])
    np.testing.assert_array_equal(segments, [[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]])
    np.testing.assert_array_equal(positions[0, 2:], [0, 1, 2])
    np.testing.assert_array_equal(positions[1, :3], [0, 1, 2])


def test_masks_combine_by_and():
    segments, _ = run(token_ids=np.ones((1, 5)), padding_mask=[[0, 1, 1, 1, 1]], segment_ids=[[1, 1, 2, 2, 0]])
    np.testing.assert_array_equal(segments, [[0, 1, 2, 2, 0]])
    assert combine_segments(None, None) is None


def test_position_ids_win_and_leave_segments_alone():
    segments, positions = run(token_ids=np.ones((1, 3)), segment_ids=[[1, 1, 2]], position_ids=[[9, 4, 4]])
    np.testing.assert_array_equal(positions, [[9, 4, 4]])
    np.testing.assert_array_equal(segments, [[1, 1, 2]])


@settings(max_examples=25)
@given(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=1, max_size=3))
def test_positions_restart_with_every_document(rows):
    """Rows of documents with given lengths, padded right to one length."""
    length = max(map(sum, rows)) + 1
    segments, expected = np.zeros((len(rows), length), "int32"), np.zeros((len(rows), length), "int32")
    for r, lengths in enumerate(rows):
        at = 0
        for number, n in enumerate(lengths, 1):
            segments[r, at : at + n], expected[r, at : at + n] = number, np.arange(n)
            at += n
        expected[r, at:] = np.arange(length - at)
    _, positions = run(token_ids=np.ones_like(segments), segment_ids=segments)
    np.testing.assert_array_equal(positions, expected)
