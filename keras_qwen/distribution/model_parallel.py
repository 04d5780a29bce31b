"""ModelParallel for Qwen: variables by the layout map, activations and the optimizer's state to match."""

import functools
import importlib
import zlib

import keras
import numpy as np

from keras_qwen import keras_private
from keras_qwen.distribution.layouts import axes_of, layout_map, supported
from keras_qwen.keras_private import AxesLayout
from keras_qwen.ops import processes
from keras_qwen.parameters import is_adapter_path
from keras_qwen.partitioning import BATCH_AXES, activation_partition, batch_shards, partition_of, update_partition


class QwenModelParallel(keras.distribution.ModelParallel):
    """The distribution that `model_parallel` returns; a `keras.distribution.ModelParallel`.

    Args:
        layouts: of `layout_map`.
        sequence_parallel, shard_optimizer: as of `model_parallel`.
    """

    def __init__(self, layouts, *, sequence_parallel=False, shard_optimizer=False):
        self.layouts, self.mesh = layouts, layouts.mesh
        super().__init__(layout_map=layouts, batch_dim_name=layouts.device_mesh.axis_names[0])
        self.sequence_parallel, self.shard_optimizer = sequence_parallel, shard_optimizer
        self._backend = importlib.import_module(f"keras_qwen.distribution.placement_{keras.backend.backend()}")
        self._backend.prepare(self.mesh)
        self._checked = None
        if idle := [i for i, rows in enumerate(self._rows_of_processes) if not rows]:
            raise ValueError(f"The mesh {self.mesh} has no device of the processes {idle}: make it of all devices.")

    # what Keras asks ---------------------------------------------------------------------------------------------

    @property
    def batch_axes(self):
        """The mesh axes that split a batch."""
        return tuple(axis for axis in BATCH_AXES if axis in self.mesh)

    @property
    def num_model_replicas(self):
        return batch_shards(self.mesh)

    def get_data_layout(self, data_shape):
        parts = self._process_parts
        if isinstance(data_shape[0], int) and data_shape[0] % parts:
            share = "" if self.num_processes == 1 else ", as this process's share of it,"
            raise ValueError(
                f"A batch of {data_shape[0]} rows cannot be split over the mesh {self.mesh}{share} into {parts} parts: "
                f"choose a batch_size that is a multiple of {parts}, and leave out the last, smaller batch."
            )
        return self.batch_layout(data_shape)

    def batch_layout(self, data_shape):
        """How a batch of a shape is split, its rows over `batch_axes`."""
        axes = tuple(axis for axis in self.batch_axes if self.mesh[axis] > 1)
        return self._layout([axes[0] if len(axes) == 1 else axes or None, *[None] * (len(data_shape) - 1)])

    def variable_layout(self, path, rank):
        """How a variable that is being made lies; what no rule is for, whole on each device."""
        return self.layouts[path] or self._layout([None] * rank)

    def get_tensor_layout(self, path):
        return None  # the layers say themselves what they compute: `place`

    # who has which rows of a batch --------------------------------------------------------------------------------

    @functools.cached_property
    def _rows_of_processes(self):
        """For each process, which of a batch's `num_model_replicas` parts its devices hold."""
        parts = self.num_model_replicas
        if keras.backend.backend() != "jax" or self.num_processes == 1:
            return [tuple(range(parts))]
        return self._backend.parts_of_processes(self.batch_layout((parts,)), parts)

    @property
    def _process_parts(self):
        return len(self._rows_of_processes[self._process_id])

    def local_rows(self, rows):
        """Which rows of a batch of so many rows this process's devices hold: an array of their numbers."""
        return (
            np.arange(rows)
            .reshape(self.num_model_replicas, -1)[list(self._rows_of_processes[self._process_id])]
            .ravel()
        )

    @property
    def data_shard_id(self):
        """Which share of the data this process needs, from 0; processes that hold the same rows need the same one."""
        return sorted(set(self._rows_of_processes)).index(self._rows_of_processes[self._process_id])

    @property
    def data_shard_count(self):
        """How many different shares of the data the processes need."""
        return len(set(self._rows_of_processes))

    # what the layers and the training step ask -------------------------------------------------------------------

    def place(self, tensor, axes, gradient=None):
        """See `keras_qwen.ops.placement.placed`."""
        layout = self._activation_layout(tensor, axes)
        of_gradient = layout if gradient is None else self._activation_layout(tensor, gradient)
        if layout.axes == of_gradient.axes:
            return self._backend.constrained(tensor, layout)
        return self._backend.moved(tensor, layout, of_gradient)

    def _activation_layout(self, tensor, axes):
        shape = [size if isinstance(size, int) else None for size in tensor.shape[: len(axes)]]
        chosen = activation_partition(axes, shape, self.mesh, sequence_parallel=self.sequence_parallel)
        return self._layout(axes_of(chosen))

    def product(self, multiply, inputs, weight, path):
        """See `keras_qwen.ops.placement.product`."""
        split = self.layouts[path]
        whole = self._layout([_without(axes, "fsdp") for axes in split.axes])
        return self._backend.product(multiply, inputs, weight, split, whole)

    def for_each_device(self, attend, query, key, value, *segments):
        """See `keras_qwen.ops.placement.for_each_device`."""
        heads, kv_heads, ways = query.shape[2], key.shape[2], self.mesh.get("model", 1)
        # Each device has the key/value heads of its own query heads, if need be one that others have, too.
        whole_groups = kv_heads % ways == 0 or (heads % ways == 0 and ways % kv_heads == 0)
        names = "batch", "length", "heads" if whole_groups else "whole", "head_dim"
        return self._backend.for_each_device(
            attend,
            (query, key, value, *segments),
            [self._activation_layout(query, names)] * 3 + [self._activation_layout(query, names[:2])] * len(segments),
            ways if whole_groups and kv_heads % ways else 1,
        )

    def update_layout(self, variable):
        """How the moments of a variable, and the computation of its update, are split."""
        layout = self.get_variable_layout(variable)
        chosen = update_partition(
            partition_of(layout), tuple(variable.shape), self.mesh, shard_optimizer=self.shard_optimizer
        )
        return self._layout(axes_of(supported(chosen)))

    def build_optimizer(self, optimizer, variables):
        """Builds an optimizer whose state is split as `update_layout` says, never larger on a device on the way."""
        layouts = [self.update_layout(variable) for variable in variables]
        with keras_private.layouts_for_state(variables, layouts):
            optimizer.build(variables)

    def constrained_whole(self, tensor):
        """A tensor, all of it on every device."""
        return self._backend.constrained(tensor, self._layout((None,) * len(tensor.shape)))

    def compiled(self, function):
        """See `keras_qwen.ops.placement.compiled`."""
        make = getattr(self._backend, "compiled", None)
        return None if make is None else make(function, self.device_mesh)

    def on_host(self, tensor):
        """See `keras_qwen.ops.placement.on_host`."""
        return self._backend.on_host(tensor)

    def check_optimizer(self, optimizer):
        """Raises ValueError for an optimizer that the backend cannot run on a mesh."""
        self._backend.check_optimizer(optimizer)

    def constrained(self, values, layouts):
        """Tensors, each split as its layout says."""
        return [self._backend.constrained(value, layout) for value, layout in zip(values, layouts, strict=True)]

    def step_function(self, model, step, trains):
        """See `keras_qwen.ops.placement.step_function`."""
        make = getattr(self._backend, "step_function", None)
        return None if make is None else make(self, model, step, trains)

    def check_model(self, model):
        """Raises ValueError where a model does not lie on this mesh by exactly one rule for each variable."""
        weights = model.weights
        if self._checked == [id(variable) for variable in weights]:
            return
        used = set()
        for variable in weights:
            pattern = self.layouts.pattern_of(variable.path)
            if pattern is None:
                if variable.path.endswith("seed_generator_state") or is_adapter_path(variable.path):
                    continue
                raise ValueError(
                    f"The variable {variable.path} matches no rule of the layout map: was that made for another config?"
                )
            used.add(pattern)
            layout = keras_private.layout_of(variable)
            if layout is None or layout.device_mesh is not self.device_mesh:
                raise ValueError(
                    f"The variable {variable.path} was made before this distribution was set, and does not lie on its "
                    f"mesh. Call keras.distribution.set_distribution(...) first, then make or load the model."
                )
            expected = tuple(self.layouts[pattern].axes)
            if len(expected) != len(variable.shape):
                raise ValueError(
                    f"The rule {pattern} says {expected} of {variable.path}, whose shape is {variable.shape}."
                )
            if tuple(layout.axes) != expected:
                raise ValueError(
                    f"The variable {variable.path} lies as {tuple(layout.axes)}, the layout map says {expected}: it "
                    f"was changed after the model was made. Change it before."
                )
        if model.config != self.layouts.config:
            raise ValueError(
                "The distribution was made for another config than this model's; make it from model.config."
            )
        if unused := set(self.layouts) - used - self.layouts.optional - self._of_other_models(model):
            raise ValueError(
                f"Rules of the layout map that match no variable of the model: {', '.join(sorted(unused))}."
            )
        self._checked = [id(variable) for variable in weights]

    def _of_other_models(self, model):
        """Rules for what a backbone has not, or a quantised model has in another form."""
        own = {r"(.*/)?lm_head/kernel"} if not model.has_head else set()
        return own | ({p for p in self.layouts if p.endswith("_proj/kernel")} if model.quantization else set())

    def _layout(self, axes):
        return AxesLayout(tuple(axes), self.device_mesh)


def _without(axes, name):
    if isinstance(axes, tuple):
        kept = tuple(axis for axis in axes if axis != name)
        return kept[0] if len(kept) == 1 else kept or None
    return None if axes == name else axes


def model_parallel(config, mesh, *, sequence_parallel=False, shard_optimizer=False) -> QwenModelParallel:
    """A distribution for `keras.distribution.set_distribution`, to be set before the model is made or loaded.

    Weights lie by `layout_map`, the batch is split over `data` and `fsdp`, activations follow the weights. The numbers
    are those of one device but for the order of sums; dropout draws others.

    On TensorFlow it is DTensor on the devices of one process. Weights, moments, gradients and activations are split as
    on JAX, with these limits: a batch is split over one axis, so that `data` and `fsdp` do not go together, and so is
    every dimension of a weight (what remains whole, `report` says); there is no XLA; attention is dense, its score
    matrices split over batch and heads; the cache of `generate` is copied for each token; DTensor takes tens of seconds
    to compile a step. Quantised bases are `"int8"`. `LossScaleOptimizer`, `gradient_accumulation_steps`,
    `ema_overwrite_frequency` and bases of fewer bits raise.

    Args:
        config: the model's config.
        mesh: `{"data": 2, "fsdp": 2, "model": 4}`: any of these axes in any order, or a `DeviceMesh` with them; or a
            `LayoutMap` of `layout_map`, with rules of one's own.
        sequence_parallel: splits the residual stream between the blocks over `model` along the length, what remat keeps
            included; the same traffic as without. Lengths that `model` does not divide are left whole.
        shard_optimizer: splits moments, gradients and the update over `data`, too (ZeRO-1).

    Raises:
        ValueError: for a mesh that does not do; see `device_mesh`. On TensorFlow also for one with both `data` and
            `fsdp` beyond 1.

    Example:
        >>> config = kq.QwenConfig.from_pretrained("Qwen/Qwen2.5-32B-Instruct")
        >>> distribution = kq.distribution.model_parallel(config, {"fsdp": 2, "model": 8}, sequence_parallel=True)
        >>> keras.distribution.set_distribution(distribution)
        >>> model = kq.QwenCausalLM.from_pretrained("Qwen/Qwen2.5-32B-Instruct", dtype="mixed_bfloat16", remat="block")
    """
    layouts = mesh if isinstance(mesh, keras.distribution.LayoutMap) else layout_map(config, mesh)
    processes.check_same(
        "config, mesh or options of model_parallel",
        {
            **config.to_hf(),
            "mesh": list(getattr(layouts, "mesh", {}).items()),
            "sequence_parallel": sequence_parallel,
            "shard_optimizer": shard_optimizer,
            "checksum of the layouts": zlib.crc32(str([(rule, layouts[rule].axes) for rule in layouts]).encode()),
        },
    )
    if getattr(layouts, "config", config) != config:
        raise ValueError("This layout map was made for another config.")
    return QwenModelParallel(layouts, sequence_parallel=sequence_parallel, shard_optimizer=shard_optimizer)
