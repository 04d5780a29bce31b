"""From checkpoint files straight into variables."""

import re
import time
import warnings

import numpy as np
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from keras_qwen import keras_private
from keras_qwen.backend import filled
from keras_qwen.checkpoint.safetensors_files import read_folder
from keras_qwen.ops.quantization import quantize
from keras_qwen.parameters import match_variables

_HEAD, _EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")  # buffers that old versions stored
# Which stored dtypes a variable's dtype holds without loss.
_EXACT = {
    "float32": {"float32", "bfloat16", "float16"},
    "bfloat16": {"bfloat16"},
    "float16": {"float16"},
    "float64": {"float64", "float32", "bfloat16", "float16"},
}
_SILENT_SECONDS = 3.0


class CheckpointTensors:
    """The tensors of a checkpoint folder, checked against the parameter table.

    Args:
        folder: the checkpoint folder.
        table: rows of `keras_qwen.parameters.parameter_table`, or of `quantized_table`.
        tied: whether the model's head is its embedding; a stored head must then equal it.
        with_head: whether the model has a head at all; a backbone passes over a stored one.
        check_finite: whether NaN and infinity in a tensor are errors.

    Raises:
        OSError: if files are missing or damaged.
        ValueError: naming tensors that are missing, unknown or of the wrong shape, and their file.
    """

    def __init__(self, folder, table, *, tied, with_head=True, check_finite=False):
        self.folder, self.table, self.check_finite = folder, table, check_finite
        stored = {n: t for n, t in read_folder(folder).items() if not _DERIVED.fullmatch(n)}
        names = {row.hf_name for row in table}
        if _HEAD in stored and _HEAD not in names:
            head = stored.pop(_HEAD)
            if tied and with_head and _EMBEDDINGS in stored and not head.equals(stored[_EMBEDDINGS]):
                raise ValueError(
                    f"{head.file} has an {_HEAD} that differs from {_EMBEDDINGS}, but config.json ties them. "
                    f"Set tie_word_embeddings to false."
                )
        if missing := sorted(names - stored.keys()):
            raise ValueError(
                f"{folder} lacks {len(missing)} of the {len(names)} tensors that its config.json asks for: "
                f"{', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}."
            )
        if unknown := sorted(stored.keys() - names):
            raise ValueError(
                f"{folder} has {len(unknown)} tensors that its config.json does not account for: "
                f"{', '.join(f'{n} in {stored[n].file.name}' for n in unknown[:5])}"
                f"{', ...' if len(unknown) > 5 else ''}."
            )
        for row in table:
            if (tensor := stored[row.hf_name]).shape != row.hf_shape:
                raise ValueError(
                    f"Tensor {row.hf_name} in {tensor.file} has shape {tensor.shape}; "
                    f"config.json asks for {row.hf_shape}."
                )
        self.tensors = {row.path: stored[row.hf_name] for row in table}

    @property
    def dtypes(self):
        """{hf_name: the numpy dtype it is stored in}."""
        return {row.hf_name: self.tensors[row.path].dtype for row in self.table}

    def common_dtype(self):
        """The dtype that all tensors have but those that are quantised; None if they differ."""
        dtypes = {str(self.tensors[row.path].dtype) for row in self.table if row.quantized is None}
        return dtypes.pop() if len(dtypes) == 1 else None

    def initialize(self, variables):
        """Makes each of the variables, whose initialisation is deferred, read its tensor when its turn comes."""
        matched = match_variables(self.table, variables)
        self._warn_if_lossy(matched)
        sizes = {row.hf_name: self.tensors[row.path].nbytes for row in self.table}
        progress, parts = _Progress(sum(sizes.values()), self.folder), {}
        for row in self.table:
            if row.quantized is None:
                read = self._initializer(row, progress)
            else:
                of_tensor = parts.setdefault(row.hf_name, _Parts(self.tensors[row.path], row.quantized, progress))
                read = of_tensor.initializer(row.part)
            keras_private.set_initializer(matched[row.path], read)

    def _initializer(self, row, progress):
        tensor = self.tensors[row.path]

        def fill(parts):
            tensor.read_parts(row.stored(parts), check_finite=self.check_finite)

        def read(shape, dtype=None, sharding=None):
            value = filled(shape, dtype, fill, sharding)
            progress.advance(tensor.nbytes)
            return value

        return read

    def _warn_if_lossy(self, matched):
        lossy = {}
        for row in self.table:
            stored, held = str(self.tensors[row.path].dtype), matched[row.path].dtype
            if row.quantized is None and stored not in _EXACT[held]:
                lossy.setdefault((stored, held), row.hf_name)
        for (stored, held), name in lossy.items():
            warnings.warn(
                f"{self.folder} stores {name} and others in {stored}, which {held} variables cannot hold exactly; "
                f"the values are rounded. Load with dtype='mixed_{held}' or 'float32' to keep them.",
                stacklevel=4,
            )


class _Parts:
    """The parts of one tensor, which is read and quantised when the first of them is asked for."""

    def __init__(self, tensor, quantized, progress):
        self.tensor, self.quantized, self.progress = tensor, quantized, progress
        self.arrays = {}

    def initializer(self, name):
        def read(shape, dtype=None, sharding=None):
            if not self.arrays:
                what = f"Tensor {self.tensor.name} in {self.tensor.file}"
                self.arrays = quantize(self.quantized, self._columns, what)
                self.progress.advance(self.tensor.nbytes)
            array = self.arrays.pop(name)  # so that it lives no longer than until its copy is made
            return filled(shape, dtype, lambda parts: _copy_parts(array, parts), sharding)

        return read

    def _columns(self, start, stop):
        rows = np.empty((stop - start, self.quantized.inputs), "float32")
        self.tensor.rows(start, stop).read_into(rows)
        return rows.T


def _copy_parts(array, parts):
    for index, target in parts:
        np.copyto(target, array[index])


class _Progress:
    """A progress bar that appears only if loading takes more than a few seconds."""

    def __init__(self, total, folder):
        self.total, self.label, self.done = total, folder.name, 0
        self.start, self.bar = time.monotonic(), None

    def advance(self, nbytes):
        self.done += nbytes
        if self.bar is None and self.done < self.total and time.monotonic() - self.start > _SILENT_SECONDS:
            self.bar = Progress(
                TextColumn("Loading {task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
            )
            self.bar.start()
            self.task = self.bar.add_task(self.label, total=self.total)
        if self.bar is not None:
            self.bar.update(self.task, completed=self.done)
            if self.done >= self.total:
                self.bar.stop()
