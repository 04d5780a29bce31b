"""What `CommunicationCost` needs of JAX."""

import re
from pathlib import Path

import jax
import keras

from keras_qwen.collectives import bytes_by_axis, read_collectives
from keras_qwen.partitioning import mesh_sizes
from keras_qwen.training.lowering_jax import lowered_step

_COLLECTIVE = re.compile(r"all-?reduce|all-?gather|reduce-?scatter|all-?to-?all|collective-?permute|nccl", re.I)
_HOST = re.compile(r"wait|rendezvous|thunkexecutor|python|pjit|execute", re.I)


def collectives(model, shapes):
    """The collectives of a model's step for batches of such shapes, and `{axis: bytes}` of them."""
    distribution = keras.distribution.distribution()

    def spec(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=distribution.get_data_layout(shape).backend_layout)

    inputs = {name: spec(*shape) for name, shape in shapes.inputs.items()}
    data = inputs, spec(shapes.rows, "int32"), spec(shapes.rows, "float32")
    text = lowered_step(model, data, lambda variable: variable.value.sharding).compile().as_text()
    found = read_collectives(text, mesh_sizes(distribution.device_mesh))
    return found, bytes_by_axis(found)


def start(folder):
    """Starts the profiler."""
    jax.profiler.start_trace(folder)


def communication_share(folder, logs):
    """Stops the profiler when a step is done; the share of collectives in its operations' time, None if unknown."""
    jax.block_until_ready(list((logs or {}).values()))
    jax.profiler.stop_trace()
    spent = {True: 0.0, False: 0.0}
    for path in Path(folder).rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            on_device = plane.name.startswith("/device:")
            for line in plane.lines:
                if not on_device and "xla" not in line.name.lower():
                    continue
                for event in line.events:
                    if not _HOST.search(event.name):
                        spent[bool(_COLLECTIVE.search(event.name))] += event.duration_ns
    total = sum(spent.values())
    return spent[True] / total if total else None
