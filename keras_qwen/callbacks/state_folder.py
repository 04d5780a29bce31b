"""A folder of training states: `step_00000120/` holds `state.json` and the variables, all or nothing.

Variables are in `variables.safetensors`: one format for all backends, so that a state saved on one is read on another,
without orbax, which imports JAX. On several devices under JAX they are in `variables/`, through orbax: each process
writes its own part. Either is read wherever the other is.
"""

import json
import os
import re
import shutil
from pathlib import Path

import keras
import ml_dtypes
import numpy as np

from keras_qwen.backend import filled
from keras_qwen.callbacks import state_orbax
from keras_qwen.checkpoint.replacing import put_in_place, replaced_folder
from keras_qwen.checkpoint.safetensors_files import STATE_DTYPES, read_header, write_file
from keras_qwen.keras_private import sharding_of
from keras_qwen.ops import processes

STATE_NAME, VARIABLES_NAME, FOLDER_NAME = "state.json", "variables.safetensors", "variables"
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
            groups: {name: variables}. All processes have to call this, with the same.

        Raises:
            OSError: naming the folder; the older states are untouched then.
        """
        path, state = self.path(step), {"format": FORMAT, "step": step, **state}
        try:
            if state_orbax.is_wanted():
                new = path.with_name(f".saving-{path.name}")
                processes.by_first(lambda: shutil.rmtree(new, ignore_errors=True))
                state_orbax.write(new / FOLDER_NAME, groups)
                processes.by_first(lambda: _finish(new, path, state))
            else:
                with replaced_folder(path, stale=lambda name: True) as new:
                    _write_safetensors(new / VARIABLES_NAME, groups)
                    write_json(new / STATE_NAME, state)
            processes.by_first(lambda: self._delete([s for s in self.steps() if s != step][: -self.keep + 1 or None]))
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
        path = self.path(step)
        if (path / FOLDER_NAME).is_dir():
            _check_alike(path / FOLDER_NAME, state_orbax.stored(path / FOLDER_NAME), groups)
            state_orbax.read(path / FOLDER_NAME, groups)
        else:
            tensors = _read_safetensors(path / VARIABLES_NAME)
            found = {g: [(name, t.dtype, t.shape) for name, t in of] for g, of in tensors.items()}
            _check_alike(path / VARIABLES_NAME, found, groups)
            for group, variables in groups.items():
                for variable, (_, tensor) in zip(variables, tensors.get(group, []), strict=True):
                    _assign(variable, tensor)

    def clean(self):
        """Removes what a killed run left half written or half deleted; to be called before the first `save`."""
        if state_orbax.is_wanted():
            state_orbax.require()
        if self.folder.is_dir() and processes.index() == 0:
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


def _write_safetensors(path, groups):
    tensors = [
        (f"{group}/{i:05d}/{variable.path}", _dtype(variable), tuple(variable.shape), _loader(variable))
        for group, variables in groups.items()
        for i, variable in enumerate(variables)
    ]
    write_file(path, tensors)


def _read_safetensors(path):
    """{group: [(variable's path, where its tensor lies)]}."""
    found = {}
    for name, tensor in sorted(read_header(path, STATE_DTYPES).items()):
        group, _, variable = name.split("/", 2)
        found.setdefault(group, []).append((variable, tensor))
    return found


def _assign(variable, tensor):
    sharding = sharding_of(variable)
    if sharding is None:
        value = np.empty(tensor.shape, tensor.dtype)
        tensor.read_into(value)
    else:
        value = filled(tensor.shape, variable.dtype, tensor.read_parts, sharding)
    variable.assign(value)


def _finish(new, path, state):
    write_json(new / STATE_NAME, state)
    put_in_place(new, path)


def _check_alike(path, stored, groups):
    for group, variables in groups.items():
        found = stored.get(group, [])
        for i in range(max(len(found), len(variables))):
            if i >= len(found) or i >= len(variables):
                name = found[i][0] if i < len(found) else variables[i].path
                missing = "the model has no such variable" if i < len(found) else "the state has no such variable"
                raise ValueError(f"{path} does not fit: {group} {name}: {missing}. {REMEDY}")
            (name, dtype, shape), variable = found[i], variables[i]
            if shape != tuple(variable.shape) or dtype != _dtype(variable):
                raise ValueError(
                    f"{path} does not fit: {group} {name} is {dtype} {shape}, the model's {variable.path} "
                    f"{variable.dtype} {tuple(variable.shape)}. {REMEDY}"
                )
