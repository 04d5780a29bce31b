"""The real training step of a model that was never given memory, lowered and compiled for devices that need not exist.

Run as a module it reads a request, a JSON object, from its standard input, and prints its result as JSON; see
`keras_qwen.planner.compiling`.
"""

import dataclasses
import json
import math
import sys
import time

import jax
import keras

from keras_qwen.collectives import read_collectives
from keras_qwen.config import QwenConfig
from keras_qwen.distribution.model_parallel import model_parallel
from keras_qwen.keras_private import abstract_variables
from keras_qwen.models.causal_lm import QwenCausalLM
from keras_qwen.models.quantizing import quantized_policy
from keras_qwen.ops import attention_backend_jax
from keras_qwen.training import AdamW
from keras_qwen.training.lowering_jax import lowered_step


def devices_for(topology, count):
    """The first devices of a topology: `"cpu"` for those of this process, or a name that libtpu knows.

    Raises:
        ValueError: for a name it does not know, and for too few devices.
    """
    if topology == "cpu":
        devices = jax.devices()
    else:
        from jax.experimental import topologies

        try:
            devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
        except RuntimeError as problem:
            raise ValueError(f"libtpu does not know the topology {topology!r}: {problem}") from problem
    if len(devices) < count:
        raise ValueError(f"The topology {topology!r} has {len(devices)} devices, the mesh needs {count}.")
    return list(devices[:count])


def build(request, optimizer, devices):
    """`(model, distribution)` of a request, without memory."""
    config = QwenConfig.from_hf(request["config"])
    mesh = keras.distribution.DeviceMesh(tuple(request["mesh"].values()), tuple(request["mesh"]), devices)
    distribution = model_parallel(
        config,
        mesh,
        sequence_parallel=request["sequence_parallel"],
        shard_optimizer=request["shard_optimizer"],
    )
    keras.distribution.set_distribution(distribution)
    dtype = request["dtype"]
    if request["quantization"] is not None:
        dtype = quantized_policy(request["quantization"], dtype, "bfloat16")
    model = QwenCausalLM(config, dtype=dtype, remat=request["remat"], attention=request["attention"])
    if request["quantization"] is not None:
        for variable in model.variables:
            variable.trainable = False
    if request["lora_rank"] is not None:
        model.enable_lora(request["lora_rank"])
    model.compile(optimizer, micro_batch_size=request["micro_batch_size"])
    distribution.build_optimizer(model.optimizer, model.trainable_variables)
    return model, distribution


def lowered(request):
    """The step of a request, traced for its devices."""
    devices = devices_for(request["topology"], math.prod(request["mesh"].values()))
    platform = "cpu" if request["topology"] == "cpu" else "tpu"
    attention_backend_jax.device = lambda: platform  # what it is for, not where it is traced
    name = request["optimizer"]
    # Its few numbers have values from the start, which there is no room for on devices that do not exist.
    optimizer = AdamW(1e-5, moments=name[6:]) if name.startswith("adamw-") else keras.optimizers.get(name)
    with abstract_variables():
        model, distribution = build(request, optimizer, devices)

        rows = (request["batch_size"], request["sequence_length"])
        split = distribution.get_data_layout(rows).backend_layout
        ids = jax.ShapeDtypeStruct(rows, "int32", sharding=split)
        weights = jax.ShapeDtypeStruct(rows, "float32", sharding=split)
        sharding_of = lambda variable: distribution.get_variable_layout(variable).backend_layout  # noqa: E731
        return lowered_step(model, ({"token_ids": ids}, ids, weights), sharding_of)


def compiled(request):
    """What the compiler says of a request: bytes of a device, seconds, and the collectives."""
    start = time.perf_counter()
    step = lowered(request)
    traced = time.perf_counter()
    done = step.compile()
    limit = request["device_memory"]
    if limit and request["topology"] != "cpu" and total(done.memory_analysis()) > limit:
        done = compiled_within(step, limit) or done
    memory = done.memory_analysis()
    return {
        "argument_bytes": memory.argument_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "trace_seconds": traced - start,
        "compile_seconds": time.perf_counter() - traced,
        "collectives": [dataclasses.asdict(one) for one in read_collectives(done.as_text(), request["mesh"])],
    }


def total(memory):
    """Bytes of a device, of JAX's `memory_analysis`."""
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes + outputs


def compiled_within(step, memory):
    """The step compiled for devices with less memory than the topology's have; None if it does not fit.

    The compiler's scheduler puts off what can wait, such as the gradients of adapters, as long as there is room.
    """
    try:
        return step.compile(compiler_options={"xla_tpu_max_hbm_size_mib": str(memory // 2**20)})
    except jax.errors.JaxRuntimeError as problem:
        if "RESOURCE_EXHAUSTED" not in str(problem):
            raise
        return None


def main():
    print(json.dumps(compiled(json.load(sys.stdin))))


if __name__ == "__main__":
    main()
