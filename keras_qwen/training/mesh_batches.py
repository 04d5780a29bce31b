"""The data of `fit`, `evaluate` and `predict` on a mesh: batches that the mesh divides, and each process's share."""

import math

import keras
import numpy as np

from keras_qwen import keras_private
from keras_qwen.ops import processes
from keras_qwen.ops.placement import batch_shards

_NO_LABEL = -100  # labels below 0 weigh nothing


class MeshBatches(keras_private.DataAdapter):
    """Batches for the active distribution, on JAX.

    Every process is given the same batches, and takes the rows that its devices hold.

    Args:
        batches: Keras's adapter of the data.
        distribution: of `keras_qwen.distribution.model_parallel`.
        fill: whether batches that the mesh does not divide are filled up with rows of weight 0; else they are refused.
        own: whether the batches are this process's share already.
    """

    def __init__(self, batches, distribution, *, fill, own):
        self.batches, self.distribution, self.fill, self.own = batches, distribution, fill, own
        self.real = []  # for each batch of the last iteration, which rows were not filled in

    def get_jax_iterator(self):
        self.real = []
        for batch in self.batches.get_jax_iterator():
            batch = self._placed(batch)
            self.distribution.get_data_layout(keras.tree.flatten(batch)[0].shape)  # raises where it cannot be split
            yield batch

    def _placed(self, batch):
        if self.own:
            return batch
        batch = keras.tree.map_structure(np.asarray, keras.utils.unpack_x_y_sample_weight(batch), none_is_leaf=False)
        rows = len(keras.tree.flatten(batch)[0])
        # An even number, so that pairs of rows stay pairs.
        missing = -rows % math.lcm(2, batch_shards()) if self.fill and rows % batch_shards() else 0
        self.real.append(np.arange(rows + missing) < rows)
        if missing:
            batch = tuple(_filled(part, missing, value) for part, value in zip(batch, (0, _NO_LABEL, 0), strict=True))
        if processes.count() > 1:
            mine = self.distribution.local_rows(rows + missing)
            batch = keras.tree.map_structure(lambda array: array[mine], batch, none_is_leaf=False)
        return keras.utils.pack_x_y_sample_weight(*batch)

    def get_numpy_iterator(self):
        return self.get_jax_iterator()

    num_batches = property(lambda self: self.batches.num_batches)
    batch_size = property(lambda self: self.batches.batch_size)
    has_partial_batch = property(lambda self: self.batches.has_partial_batch)
    partial_batch_size = property(lambda self: self.batches.partial_batch_size)

    def on_epoch_begin(self):
        self.batches.on_epoch_begin()

    def on_epoch_end(self):
        self.batches.on_epoch_end()


def _filled(structure, missing, value):
    def fill(array):
        return np.concatenate([array, np.full((missing, *array.shape[1:]), value, array.dtype)])

    return keras.tree.map_structure(fill, structure, none_is_leaf=False)


def on_mesh(arguments, *, fill) -> dict:
    """The arguments of Keras's `fit`, `evaluate` or `predict`, their data as `MeshBatches` if there is a mesh.

    Args:
        arguments: all of them, a dict.
        fill: whether the last, smaller batch may be filled up with rows of weight 0.

    Raises:
        ValueError: if data that are shared out to processes already are not shared out as the mesh is.
    """
    distribution = keras.distribution.distribution()
    if keras.backend.backend() != "jax" or not hasattr(distribution, "local_rows"):
        return arguments
    if isinstance(arguments["x"], MeshBatches):  # `fit` evaluates
        return arguments
    arguments = dict(arguments)
    get = arguments.get
    held_out, batch_size = get("validation_data"), get("batch_size")
    if get("validation_split") and held_out is None:
        (arguments["x"], arguments["y"], arguments["sample_weight"]), held_out = split_validation(
            (get("x"), get("y"), get("sample_weight")), get("validation_split")
        )
    if held_out is not None:
        size = get("validation_batch_size") or batch_size
        x, y, weights = keras.utils.unpack_x_y_sample_weight(held_out)
        arguments["validation_data"] = _batches(distribution, fill, x, y, weights, size, get("validation_steps"))
    steps = get("steps_per_epoch") or get("steps")
    arguments["x"] = _batches(
        distribution,
        fill,
        get("x"),
        get("y"),
        get("sample_weight"),
        batch_size,
        steps,
        get("shuffle"),
        get("class_weight"),
    )
    taken = dict(y=None, sample_weight=None, batch_size=None, validation_split=0.0, class_weight=None)
    return arguments | {name: value for name, value in taken.items() if name in arguments}


def _batches(distribution, fill, x, y, sample_weight, batch_size, steps, shuffle=False, class_weight=None):
    count = getattr(x, "shard_count", 1)
    if count not in (1, distribution.data_shard_count):
        raise ValueError(
            f"The dataset has shard_count={count}, but the processes hold {distribution.data_shard_count} different "
            f"parts of a batch. Use shard_index=distribution.data_shard_id, shard_count=distribution.data_shard_count; "
            f"or leave both out."
        )
    if processes.count() > 1 and shuffle:  # Keras shuffles arrays by numpy's numbers
        state = processes.of_first([part if np.isscalar(part) else part.tolist() for part in np.random.get_state()])
        np.random.set_state(tuple(state))
    shares, distribution.auto_shard_dataset = distribution.auto_shard_dataset, False  # or Keras refuses arrays
    try:
        batches = keras_private.data_adapter(x, y, sample_weight, batch_size, steps, shuffle, class_weight)
    finally:
        distribution.auto_shard_dataset = shares
    own = processes.count() > 1 and (count > 1 or not shares)
    return MeshBatches(batches, distribution, fill=fill, own=own)


def split_validation(data, fraction):
    """`(training, validation)` of `(x, y, sample_weight)`; as Keras does it, the last rows are for validation."""
    rows = len(next(array for array in keras.tree.flatten(data) if array is not None))
    at = math.floor(rows * (1.0 - fraction))

    def take(part):
        return keras.tree.map_structure(lambda array: None if array is None else array[part], data)

    return take(slice(None, at)), take(slice(at, None))
