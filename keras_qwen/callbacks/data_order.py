"""The order in which `fit` sees its data, made so that it can be taken up again in the middle.

Keras shuffles arrays by random numbers that nothing can save (a TensorFlow kernel's, Python's). Here the order follows
from a seed and the number of the pass over the data.
"""

import functools
import math

import keras
import numpy as np

from keras_qwen.training.mesh_batches import split_validation


class BatchStream(keras.utils.PyDataset):
    """Batches without end, pass after pass over a source, from any position on.

    Args:
        source: has `num_batches` (None: without end), `batch(number, pass_index)`, `begin_pass()` and `end_pass()`.
        start: position of the first batch.
        **options: of `PyDataset`: workers and the like.
    """

    def __init__(self, source, start, **options):
        super().__init__(**options)
        self.source, self.start, self._pass, self._first = source, start, 0, {}

    num_batches = None  # Keras: without end

    def __getitem__(self, index):
        if index > 1:
            return self._batch(index)
        if index not in self._first:  # Keras looks at two batches before it begins; the source may have changed by then
            self._first[index] = self._batch(index)
        return self._first[index]

    def on_epoch_begin(self):
        if self.source.num_batches is None:
            self.source.begin_pass()

    def on_epoch_end(self):
        if self.source.num_batches is None:
            self.source.end_pass()

    def _batch(self, index):
        position, count = self.start + index, self.source.num_batches
        if count is None:
            return self.source.batch(position, 0)
        pass_index, number = divmod(position, count)
        while self._pass < pass_index:  # also for the passes before the start: a source may change from one to the next
            self.source.end_pass()
            self.source.begin_pass()
            self._pass += 1
        return self.source.batch(number, pass_index)


class ArrayBatches:
    """Arrays in batches.

    Args:
        arrays: `(x, y, sample_weight)` as for `fit`.
        batch_size: rows of a batch; the last may have fewer.
        shuffle: True for rows, `"batch"` for batches, False.
        seed: of the order.
    """

    def __init__(self, arrays, batch_size, shuffle, seed):
        while len(arrays) > 1 and arrays[-1] is None:
            arrays = arrays[:-1]
        self.arrays, self.batch_size, self.shuffle, self.seed = arrays, batch_size, shuffle, seed
        lengths = {len(a) for a in keras.tree.flatten(arrays) if a is not None}
        if len(lengths) != 1 or 0 in lengths:
            raise ValueError(f"The arrays have {sorted(lengths)} rows; they must have one number of rows, not 0.")
        self.rows = lengths.pop()
        self.num_batches = math.ceil(self.rows / batch_size)

    def batch(self, number, pass_index):
        size = self.batch_size
        if self.shuffle == "batch":
            number = int(permutation(self.num_batches, self.seed, pass_index)[number])
        rows = slice(number * size, (number + 1) * size)
        if self.shuffle and self.shuffle != "batch":
            rows = permutation(self.rows, self.seed, pass_index)[rows]
        return keras.tree.map_structure(lambda a: None if a is None else a[rows], self.arrays)

    def begin_pass(self):
        pass

    def end_pass(self):
        pass


class DatasetBatches:
    """A `PyDataset` as the source of a `BatchStream`, its batches shuffled or not."""

    def __init__(self, dataset, shuffle, seed):
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.num_batches = dataset.num_batches
        self.begin_pass, self.end_pass = dataset.on_epoch_begin, dataset.on_epoch_end

    def batch(self, number, pass_index):
        if self.shuffle and self.num_batches is not None:
            number = int(permutation(self.num_batches, self.seed, pass_index)[number])
        return self.dataset[number]


@functools.lru_cache(maxsize=4)
def permutation(count, seed, pass_index):
    """The order of `count` things in a pass."""
    return np.random.default_rng([seed, pass_index]).permutation(count)


def are_arrays(*structures):
    """Whether all are arrays or nests of arrays (None aside)."""
    leaves = [leaf for leaf in keras.tree.flatten(structures) if leaf is not None]
    return bool(leaves) and all(hasattr(leaf, "shape") and hasattr(leaf, "__array__") for leaf in leaves)


def replayable(arguments, seed, start):
    """The arguments of `fit` with data that begins where it is to: arrays and PyDatasets become a `BatchStream`.

    Args:
        arguments: of Keras's `fit`, a dict.
        seed: of the order.
        start: how many batches have been trained on.

    Returns:
        `(arguments, positioned)`; `positioned` is False for other kinds of data, which `fit` begins from the front.

    Raises:
        ValueError: for a PyDataset whose order cannot be replayed.
    """
    arguments = dict(arguments)
    x, shuffle, steps = arguments["x"], arguments["shuffle"], arguments["steps_per_epoch"]
    if hasattr(x, "start_at"):  # kq.data.ChatDataset
        x.start_at(start)
        return arguments, True
    if isinstance(x, keras.utils.PyDataset):
        changes = any(
            getattr(type(x), name) is not getattr(keras.utils.PyDataset, name)
            for name in ("on_epoch_begin", "on_epoch_end")
        )
        if changes and (x.workers > 1 or x.use_multiprocessing):
            raise ValueError(
                f"{type(x).__name__} changes between epochs and is read by {x.workers} workers, so that its order "
                f"cannot be replayed. Use workers=1, or make a batch depend on its index alone."
            )
        source = DatasetBatches(x, shuffle, seed)
        options = dict(workers=x.workers, use_multiprocessing=x.use_multiprocessing, max_queue_size=x.max_queue_size)
    elif are_arrays(x, arguments["y"], arguments["sample_weight"]):
        data = keras.tree.map_structure(
            lambda a: None if a is None else np.asarray(a), (x, arguments["y"], arguments["sample_weight"])
        )
        if arguments["validation_split"] and arguments["validation_data"] is None:
            data, arguments["validation_data"] = split_validation(data, arguments["validation_split"])
        rows = len(next(a for a in keras.tree.flatten(data) if a is not None))
        size = arguments["batch_size"] or (math.ceil(rows / steps) if steps else 32)
        arguments["validation_batch_size"] = arguments["validation_batch_size"] or arguments["batch_size"]
        source, options = ArrayBatches(data, size, shuffle, seed), {}
    else:
        return arguments, False
    arguments |= dict(
        x=BatchStream(source, start, **options),
        y=None,
        sample_weight=None,
        batch_size=None,
        validation_split=0.0,
        shuffle=False,
        steps_per_epoch=steps or source.num_batches,
    )
    return arguments, True
