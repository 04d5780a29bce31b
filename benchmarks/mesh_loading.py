"""python -m benchmarks.mesh_loading CHECKPOINT [--rounds N]: time and host memory of loading on a mesh (JAX, CPU).

Loads the checkpoint in float32 on one device, on 8 simulated devices, and in two processes with 4 devices each; every
case in processes of its own, case after case for N rounds (default 3), so that a busy machine slows all of them alike.
Printed are the best times, and for each process its own share of the model, which is what its devices hold together,
copies included, and how far the resident memory rose beyond that at its peak. A JSON document comes last.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time

from benchmarks.measure import peak_since_reset_mb, reset_peak, resident_mb

CASES = {
    "1 device": (1, 1, {}),
    "fsdp 8": (1, 8, {"fsdp": 8}),
    "fsdp 4, model 2": (1, 8, {"fsdp": 4, "model": 2}),
    "2 processes: fsdp 8": (2, 4, {"fsdp": 8}),
    "2 processes: model 2, fsdp 4": (2, 4, {"model": 2, "fsdp": 4}),
}


def measure(checkpoint, mesh):
    """The figures of this process."""
    import keras

    import keras_qwen as kq

    if "KERAS_DISTRIBUTION_PROCESS_ID" in os.environ:
        kq.distribution.initialize()
    config = kq.QwenConfig.from_pretrained(checkpoint)
    tiny = dict(vocab_size=64, hidden_size=64, intermediate_size=64, num_attention_heads=8, num_key_value_heads=8)
    tiny = kq.QwenConfig(model_type="qwen2", **tiny, num_hidden_layers=1)
    if mesh:  # what libraries take when first used is not the model's
        keras.distribution.set_distribution(kq.distribution.model_parallel(tiny, mesh))
    kq.QwenCausalLM(tiny)
    if mesh:
        keras.distribution.set_distribution(kq.distribution.model_parallel(config, mesh))
    before = resident_mb()
    reset_peak()
    start = time.perf_counter()
    model = kq.QwenCausalLM.from_pretrained(checkpoint, dtype="float32")
    seconds = time.perf_counter() - start
    rise = peak_since_reset_mb() - before
    share = sum(piece.data.nbytes for v in model.variables for piece in v.value.addressable_shards) / 2**20
    return {"load_s": seconds, "share_mb": share, "beyond_mb": rise - share}


def run(checkpoint, case):
    """The figures of a case: a list with those of each process."""
    processes, devices, mesh = CASES[case]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    shared = {**os.environ, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "benchmarks.mesh_loading", checkpoint, "--one", json.dumps(mesh)]
    started = []
    for i in range(processes):
        names = dict(JOB_ADDRESSES=address, NUM_PROCESSES=processes, PROCESS_ID=i) if processes > 1 else {}
        own = {f"KERAS_DISTRIBUTION_{name}": str(value) for name, value in names.items()}
        started.append(subprocess.Popen(command, env={**shared, **own}, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise RuntimeError(f"{case} failed, see above.")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        return print("\n" + json.dumps(measure(options.checkpoint, options.one)))
    rounds = [{case: run(options.checkpoint, case) for case in CASES} for _ in range(options.rounds)]
    rows = []
    print(f"{'':30} {'seconds':>8} {'x one':>6}  {'share, MiB':>18} {'beyond, MiB':>12}")
    for case in CASES:
        seconds = min(max(one["load_s"] for one in found[case]) for found in rounds)
        shares = [one["share_mb"] for one in rounds[0][case]]
        beyond = max(one["beyond_mb"] for found in rounds for one in found[case])
        rows.append({"case": case, "load_s": seconds, "share_mb": shares, "beyond_mb": beyond})
        share = " + ".join(f"{share:.0f}" for share in shares)
        print(f"{case:30} {seconds:8.2f} {seconds / rows[0]['load_s']:6.2f}  {share:>18} {beyond:12.0f}")
    print(json.dumps({"backend": "jax", "dtype": "float32", "rounds": options.rounds, "rows": rows}))


if __name__ == "__main__":
    main()
