"""The variables of a training state on several devices, through orbax: each process writes what its devices hold.

Orbax (JAX only) stores every variable as one array, so a state can be read on another mesh, or on one device.
"""

import contextlib

import keras
import numpy as np

from keras_qwen import keras_private
from keras_qwen.backend import host_value
from keras_qwen.ops import processes


def is_wanted() -> bool:
    """Whether variables lie on several devices, on JAX."""
    distribution = keras.distribution.distribution()
    return keras.backend.backend() == "jax" and distribution is not None and distribution.device_mesh.devices.size > 1


def require():
    """Orbax.

    Raises:
        ImportError: naming the remedy, where it is not installed.
    """
    try:
        import orbax.checkpoint
    except ImportError as problem:
        raise ImportError(
            "The training states of a model on several devices are written by orbax: "
            "pip install 'keras-qwen[distributed]'."
        ) from problem
    return orbax.checkpoint


def write(folder, groups):
    """Writes variables into a folder of their own, which is there with all of them or not at all.

    Args:
        folder: where to; what is there is replaced. All processes have to call this.
        groups: {name: variables}.

    Raises:
        OSError: if that fails.
    """
    tree = {
        group: {f"{i:05d} {variable.path.replace('/', '.')}": _value(variable) for i, variable in enumerate(variables)}
        for group, variables in groups.items()
        if variables
    }
    with _checkpointer(folder) as (orbax, checkpointer):
        checkpointer.save(folder, args=orbax.args.PyTreeSave(tree), force=True)


def stored(folder) -> dict:
    """What a folder holds: {group: [(name, dtype, shape)]}.

    Raises:
        OSError: if it is damaged.
    """
    with _checkpointer(folder) as (_, checkpointer):
        metadata = checkpointer.metadata(folder).item_metadata
    if metadata is None:
        raise OSError(f"{folder} is damaged. Delete {folder.parent} to resume from an older state.")
    return {
        group: [(key, variable.dtype, tuple(variable.shape)) for key, variable in sorted(variables.items())]
        for group, variables in metadata.tree.items()
    }


def read(folder, groups):
    """Assigns what a folder holds to variables; each process reads what its devices hold.

    Args:
        folder: of `write`. All processes have to call this.
        groups: {name: variables}, as many and of the shapes and dtypes that `stored` says.

    Raises:
        OSError: if the folder is damaged.
    """
    groups = {group: variables for group, variables in groups.items() if variables}
    keys = {group: [key for key, _, _ in of] for group, of in stored(folder).items()}
    wanted = {group: dict(zip(keys[group], map(_wanted, groups[group]), strict=True)) for group in groups}
    for variables in groups.values():
        for variable in variables:
            keras_private.release(variable)  # or there would be room for old and new values needed
    with _checkpointer(folder) as (orbax, checkpointer):
        types = orbax.checkpoint_utils.construct_restore_args(wanted)
        arguments = orbax.args.PyTreeRestore(wanted, restore_args=types, partial_restore=True)
        values = checkpointer.restore(folder, args=arguments)
    for group, variables in groups.items():
        for key, variable in zip(keys[group], variables, strict=True):
            variable.assign(values[group].pop(key))


def _value(variable):
    value = variable.value
    # What each process has for itself (seeds that were there before the mesh) is alike, and the first one's is kept.
    return host_value(value) if processes.count() > 1 and value.is_fully_addressable else value


def _wanted(variable):
    import jax

    value = variable.value
    if processes.count() > 1 and value.is_fully_addressable:
        return np.empty(value.shape, value.dtype)
    return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=value.sharding)


@contextlib.contextmanager
def _checkpointer(folder):
    orbax = require()
    try:
        with orbax.Checkpointer(orbax.PyTreeCheckpointHandler()) as checkpointer:
            yield orbax, checkpointer
    except (ValueError, KeyError) as problem:  # of tensorstore, which has no others for full disks and damaged files
        raise OSError(f"{folder} cannot be read or written: {str(problem).splitlines()[0]}") from problem
