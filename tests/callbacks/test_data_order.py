"""The order of data: every row once a pass, the same from any start, as Keras cuts it."""

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_qwen.callbacks.data_order import ArrayBatches, BatchStream, replayable

ARGUMENTS = dict(
    y=None, sample_weight=None, batch_size=None, shuffle=True, steps_per_epoch=None, validation_split=0.0,
    validation_data=None, validation_batch_size=None,
)  # fmt: skip


@settings(max_examples=60)
@given(
    rows=st.integers(1, 23),
    size=st.integers(1, 9),
    shuffle=st.sampled_from([True, False, "batch"]),
    start=st.integers(0, 40),
    seed=st.integers(0, 99),
)
def test_a_stream_from_the_middle_is_the_rest_of_the_whole(rows, size, shuffle, start, seed):
    array = np.arange(rows)
    whole = BatchStream(ArrayBatches((array,), size, shuffle, seed), 0)
    part = BatchStream(ArrayBatches((array,), size, shuffle, seed), start)
    for i in range(6):
        np.testing.assert_array_equal(part[i][0], whole[start + i][0])
    count = -(-rows // size)
    for pass_index in range(2):
        seen = [whole[pass_index * count + i][0] for i in range(count)]
        assert sorted(np.concatenate(seen)) == list(range(rows))
        if shuffle != "batch":  # else the smaller batch may come anywhere
            assert [len(x) for x in seen] == [size] * (count - 1) + [rows - size * (count - 1)]


def test_orders_differ_by_pass_and_seed():
    def order(seed, pass_index):
        source = ArrayBatches((np.arange(50),), 50, True, seed)
        return tuple(BatchStream(source, pass_index)[0][0])

    assert len({order(seed, pass_index) for seed in (1, 2) for pass_index in (0, 1)}) == 4


class Changing(keras.utils.PyDataset):
    """Counts its epochs in what it gives."""

    def __init__(self, **options):
        super().__init__(**options)
        self.epoch = 0

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return (np.array([self.epoch, index]),)

    def on_epoch_end(self):
        self.epoch += 1


@pytest.mark.parametrize("start", [0, 2, 3, 7])
def test_a_dataset_that_changes_is_asked_to_as_often_as_it_would_be(start):
    arguments, positioned = replayable({**ARGUMENTS, "x": Changing(), "shuffle": False}, 0, start)
    stream = arguments["x"]
    stream[0], stream[1]  # TensorFlow looks at two batches first
    found = [tuple(stream[i][0]) for i in range(5)]
    assert positioned and found == [divmod(start + i, 3) for i in range(5)]
    assert arguments["steps_per_epoch"] == 3 and arguments["shuffle"] is False


def test_a_dataset_that_changes_is_not_read_by_several_workers():
    with pytest.raises(ValueError, match="Changing changes between epochs and is read by 2 workers"):
        replayable({**ARGUMENTS, "x": Changing(workers=2)}, 0, 0)


def test_validation_split_takes_the_last_rows():
    x, y = np.arange(10), np.arange(10) * 2
    given = {**ARGUMENTS, "x": x, "y": y, "validation_split": 0.25, "batch_size": 4, "shuffle": False}
    arguments, _ = replayable(given, 0, 0)
    stream = arguments["x"]
    np.testing.assert_array_equal(np.concatenate([stream[0][0], stream[1][0]]), np.arange(7))
    np.testing.assert_array_equal(arguments["validation_data"][1], np.arange(7, 10) * 2)
    assert arguments["validation_batch_size"] == 4 and arguments["validation_split"] == 0.0


def test_steps_per_epoch_and_no_batch_size_as_in_keras():
    arguments, _ = replayable({**ARGUMENTS, "x": np.arange(10), "steps_per_epoch": 3}, 0, 0)
    assert arguments["steps_per_epoch"] == 3 and len(arguments["x"][0][0]) == 4


def test_other_data_is_left_alone():
    batches = (batch for batch in [1, 2])
    arguments, positioned = replayable({**ARGUMENTS, "x": batches}, 0, 5)
    assert arguments["x"] is batches and not positioned


def test_arrays_of_different_lengths():
    with pytest.raises(ValueError, match="must have one number of rows"):
        replayable({**ARGUMENTS, "x": np.arange(3), "y": np.arange(4)}, 0, 0)
