"""A folder of training states: `step_00000120/` holds `state.json` and `variables.safetensors`, all or nothing.

Safetensors rather than orbax: orbax imports JAX, which must not be loaded (nor take the GPU) beside TensorFlow, and one
format serves all backends, so that a state saved on one is read on another.
"""

import json
import os
import re
import shutil
from pathlib import Path

import keras
import ml_dtypes
import numpy as np

from keras_qwen.checkpoint.replacing import replaced_folder
from keras_qwen.checkpoint.safetensors_files import STATE_DTYPES, read_header, write_file

STATE_NAME, VARIABLES_NAME = "state.json", "variables.safetensors"
FORMAT = 1
REMEDY = "Train as before, or give the new run a folder of its own."
_NAME = re.compile(r"step_(\d{8,})")


class StateFolder:
    """The states of one training run.

    Args:
        folder: where they are; created at the first save.
        keep: how many to keep, the newest; at least 1.
    """

    def __init__(self, folder, keep):
        self.folder, self.keep = Path(folder).absolute(), keep

    def path(self, step):
        """The folder of a step's state."""
        return self.folder / f"step_{step:08d}"

    def steps(self) -> list[int]:
        """The steps that a state was saved of, ascending."""
        if not self.folder.is_dir():
            return []
        found = ((_NAME.fullmatch(path.name), path) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match, path in found if match and path.is_dir())

    def save(self, step, state, groups):
        """Writes a state, and then deletes those beyond `keep`.

        Args:
            step: number of the step it was taken after.
            state: what goes into state.json, a dict.
            groups: {name: variables}, what goes into variables.safetensors.

        Raises:
            OSError: naming the folder; the older states are untouched then.
        """
        path = self.path(step)
        try:
            with replaced_folder(path, stale=lambda name: True) as new:
                tensors = [
                    (f"{group}/{i:05d}/{variable.path}", _dtype(variable), tuple(variable.shape), _loader(variable))
                    for group, variables in groups.items()
                    for i, variable in enumerate(variables)
                ]
                write_file(new / VARIABLES_NAME, tensors)
                write_json(new / STATE_NAME, {"format": FORMAT, "step": step, **state})
            self._delete([s for s in self.steps() if s != step][: -self.keep + 1 or None])
        except OSError as problem:
            older = [s for s in self.steps() if s != step]
            kept = f"The state of step {older[-1]} there is intact" if older else "There is no older state there"
            reason = problem.strerror or problem
            raise OSError(
                problem.errno, f"The training state of step {step} cannot be saved in {self.folder}: {reason}. {kept}."
            ) from problem

    def read(self, step) -> dict:
        """A step's state.json.

        Raises:
            OSError: if it is missing or damaged.
            ValueError: if it was written by a later version.
        """
        path = self.path(step) / STATE_NAME
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as problem:
            raise OSError(
                f"{path} is damaged: {problem}. Delete {path.parent} to resume from an older state."
            ) from problem
        if state.get("format") != FORMAT:
            raise ValueError(f"{path} has format {state.get('format')}, this version of keras_qwen reads {FORMAT}.")
        return state

    def restore(self, step, groups):
        """Assigns a step's values to variables.

        Args:
            groups: as of `save`; groups that are not given are not read.

        Raises:
            OSError: if the file is missing or damaged.
            ValueError: if number, shapes or dtypes of the variables differ, naming the first.
        """
        path = self.path(step) / VARIABLES_NAME
        stored = {}
        for name, tensor in sorted(read_header(path, STATE_DTYPES).items()):
            group, _, variable = name.split("/", 2)
            stored.setdefault(group, []).append((variable, tensor))
        for group, variables in groups.items():
            _check_alike(path, group, stored.get(group, []), variables)
        for group, variables in groups.items():
            for variable, (_, tensor) in zip(variables, stored.get(group, []), strict=True):
                value = np.empty(tensor.shape, tensor.dtype)
                tensor.read_into(value)
                variable.assign(value)

    def clean(self):
        """Removes what a killed process left half written or half deleted; for the one process that writes here."""
        if self.folder.is_dir():
            for path in self.folder.glob(".*step_*"):
                shutil.rmtree(path, ignore_errors=True)

    def _delete(self, steps):
        for step in steps:
            doomed = self.folder / f".deleted-step_{step:08d}"  # hidden first, so that none is seen half deleted
            shutil.rmtree(doomed, ignore_errors=True)
            os.rename(self.path(step), doomed)
            shutil.rmtree(doomed)


def write_json(path, content):
    """Writes a file and forces it to the disk."""
    with open(path, "x", encoding="utf-8") as file:
        json.dump(content, file, indent=1, default=float)
        file.flush()
        os.fsync(file.fileno())


def _dtype(variable):
    name = keras.backend.standardize_dtype(variable.dtype)
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def _loader(variable):
    return lambda: np.asarray(keras.ops.convert_to_numpy(variable.value))


def _check_alike(path, group, stored, variables):
    for i in range(max(len(stored), len(variables))):
        if i >= len(stored) or i >= len(variables):
            name = stored[i][0] if i < len(stored) else variables[i].path
            missing = "the model has no such variable" if i < len(stored) else "the state has no such variable"
            raise ValueError(f"{path} does not fit: {group} {name}: {missing}. {REMEDY}")
        (name, tensor), variable = stored[i], variables[i]
        if tensor.shape != tuple(variable.shape) or tensor.dtype != _dtype(variable):
            raise ValueError(
                f"{path} does not fit: {group} {name} is {tensor.dtype} {tensor.shape}, the model's {variable.path} "
                f"{variable.dtype} {tuple(variable.shape)}. {REMEDY}"
            )
