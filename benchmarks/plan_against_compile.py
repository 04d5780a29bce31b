"""python -m benchmarks.plan_against_compile [INDEX ...]: the planner's estimate beside the compiler's own account.

Compiles the real training step of each case for TPU v5p 2x2x4 (as many of its devices as the mesh has), without a TPU:
`pip install "keras-qwen[planner]"`. Minutes a case; what is compiled is added to the results of the day. A table and a
JSON document come last.
"""

import datetime
import importlib.metadata
import json
import statistics
import sys

from benchmarks.harness import RESULTS
from keras_qwen.collectives import bytes_by_axis
from keras_qwen.config import QwenConfig
from keras_qwen.hardware import memory_bytes
from keras_qwen.memory_estimate import Setup
from keras_qwen.planner.plan import MemoryPlan
from keras_qwen.planner.published import published

TOPOLOGY = "v5p:2x2x4"
PACKAGES = ("keras", "jax", "libtpu")
_MESH = {"fsdp": 2, "model": 8}
_32B = dict(model="32B", mesh=_MESH, batch_size=8, sequence_length=4096, sequence_parallel=True)
_FOUR = dict(_32B, mesh={"fsdp": 2, "model": 2}, batch_size=2, sequence_length=2048)
CASES = [
    dict(model="0.5B", mesh={}, batch_size=4, sequence_length=1024, remat=None),
    dict(model="0.5B", mesh={}, batch_size=1, sequence_length=8192),
    dict(model="0.5B", mesh={}, batch_size=1, sequence_length=32_768),
    dict(model="0.5B", mesh={"fsdp": 4}, batch_size=8, sequence_length=2048, remat="attention"),
    dict(model="1.5B", mesh={}, batch_size=4, sequence_length=2048, remat=None, lora_rank=16),
    dict(model="1.5B", mesh={}, batch_size=2, sequence_length=2048),
    dict(model="0.5B", mesh={"data": 8}, batch_size=16, sequence_length=1024, remat="mlp", shard_optimizer=True),
    dict(model="7B", mesh={"fsdp": 4, "model": 2}, batch_size=8, sequence_length=4096, sequence_parallel=True),
    dict(_32B),
    dict(model="1.5B", mesh={}, batch_size=2, sequence_length=2048, lora_rank=16, quantization="nf4"),
    dict(model="1.5B", mesh={}, batch_size=2, sequence_length=2048, optimizer="adamw-int8", device_memory="14.4GB"),
    dict(_FOUR, lora_rank=16, dtype="bfloat16"),
    dict(model="0.5B", mesh={}, batch_size=8, sequence_length=1024, micro_batch_size=2),
    dict(_FOUR, dtype="bfloat16", optimizer="adamw-int8"),
    dict(model="0.5B", mesh={}, batch_size=2, sequence_length=1024, dtype="float32"),
    dict(model="1.5B", mesh={"fsdp": 2, "model": 2}, batch_size=2, sequence_length=32_768, sequence_parallel=True),
    dict(_FOUR, lora_rank=16, quantization="nf4"),
    dict(model="1.5B", mesh={}, batch_size=2, sequence_length=2048, lora_rank=16, dtype="bfloat16"),
    dict(_32B, layers=16),
    dict(_FOUR, mesh={"data": 4}, batch_size=4, sequence_parallel=False, lora_rank=16, dtype="bfloat16"),
    dict(_FOUR, mesh={"data": 4}, batch_size=4, sequence_parallel=False, lora_rank=16, quantization="nf4"),
    dict(_FOUR, model="7B"),
    dict(_FOUR, model="7B", device_memory="30.7GB"),
    dict(model="7B", mesh={"fsdp": 4}, batch_size=4, sequence_length=2048, remat=None),
    dict(_FOUR, device_memory="80GB"),
]  # fmt: skip


def plan_of(case) -> MemoryPlan:
    """The plan of a case."""
    settings = dict(case)
    memory = settings.pop("device_memory", None)
    layers, config = settings.pop("layers", None), published(f"Qwen2.5-{settings.pop('model')}")
    if layers:
        config = QwenConfig.from_hf({**config.to_hf(), "num_hidden_layers": layers, "layer_types": None})
    setup = Setup(config, **settings)
    return MemoryPlan.of(setup, memory and memory_bytes(memory))


def main():
    chosen = [CASES[int(index)] for index in sys.argv[1:]] or CASES
    path = RESULTS / f"plan_against_compile_{TOPOLOGY.replace(':', '-')}_{datetime.date.today().isoformat()}.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    for case in chosen:
        step = plan_of(case).compile(TOPOLOGY)
        print(step, flush=True)
        rows = [row for row in rows if row["case"] != case]
        rows.append(
            {
                "case": case,
                "argument_bytes": step.argument_bytes,
                "temp_bytes": step.temp_bytes,
                "total_bytes": step.total_bytes,
                "compile_seconds": step.compile_seconds,
                "communication_bytes": bytes_by_axis(step.collectives),
            }
        )
        write(path, rows)
    print(table(rows))
    print(json.dumps(rows))


def write(path, rows):
    """Writes the results of a day."""
    document = {
        "case": "plan_against_compile",
        "what": f"Bytes of each device, estimated and compiled for TPU {TOPOLOGY}",
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "rows": sorted(rows, key=lambda row: CASES.index(row["case"])),
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


def table(rows):
    """The rows, their estimates, and how far these are off."""
    errors, lines = [], [f"{'case':100} {'compiled':>9} {'estimated':>9} {'error':>7}"]
    for row in rows:
        plan = plan_of(row["case"])
        errors.append(plan.total_bytes / row["total_bytes"] - 1)
        case = ", ".join(f"{name} {value}" for name, value in row["case"].items())
        lines.append(f"{case:100} {row['total_bytes'] / 1e9:9.2f} {plan.total_bytes / 1e9:9.2f} {errors[-1]:+7.1%}")
    errors = [abs(error) for error in errors]
    return "\n".join([*lines, f"median error {statistics.median(errors):.1%}, largest {max(errors):.1%}"])


if __name__ == "__main__":
    main()
