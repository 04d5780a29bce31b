"""What every test shares: the backend's choice, seeds, and the golden data."""

import importlib.util
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before TensorFlow is imported: no banners among the results
os.environ.setdefault("MPLBACKEND", "agg")
# The tests' many small programs take longer to compile than to run.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # of this run alone; pytest-xdist's processes share it
    _cache = tempfile.TemporaryDirectory(prefix="keras_qwen_tests_", ignore_cleanup_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _cache.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import hypothesis
import keras
import numpy as np
import pytest

hypothesis.settings.register_profile("keras_qwen", deadline=None)  # how long something takes decides no test
hypothesis.settings.load_profile("keras_qwen")

DATA = Path(__file__).parent / "data"

# The live comparisons need transformers and peft, which `make parity` has in an environment of its own.
collect_ignore = [] if importlib.util.find_spec("transformers") else ["parity"]


@pytest.fixture(autouse=True)
def seeds():
    """Every test starts from the same random state, and from Keras's default names and policies.

    Not `keras.utils.set_random_seed`: it imports TensorFlow wherever that is installed, under JAX too.
    """
    keras.utils.clear_session(free_memory=False)
    random.seed(0)
    np.random.seed(0)


@pytest.fixture(scope="session")
def reference_folder():
    """A function from a reference checkpoint's name to its folder: config.json, model.safetensors, expected.npz."""

    def folder(name):
        path = DATA / "reference" / name
        assert path.is_dir(), f"no reference data named {name}"
        return path

    return folder


_PREAMBLE = """
import json, os, random, sys
sys.modules["tensorflow"] = None  # which Keras would load for nothing
import keras, numpy as np
import keras_qwen as kq
arguments = json.loads(sys.argv[1])
def report(**values):
    print("\\nREPORT " + json.dumps(values), flush=True)
if "KERAS_DISTRIBUTION_PROCESS_ID" in os.environ:
    kq.distribution.initialize(timeout=20)
"""


@pytest.fixture(scope="session")
def on_devices():
    """A function that runs a piece of code on simulated devices of JAX, in fresh processes.

    Of `run(code, devices=8, processes=1, **arguments)`: the code finds `kq`, `keras`, `np`, the dict `arguments`, and
    `report(**values)`, whose values come back: a list with one dict for each process, of all that it has reported, its
    `returncode` and its `output`. With several processes, each has so many devices, and they are connected already.
    """
    if keras.backend.backend() != "jax":
        pytest.skip("simulated devices are JAX's here")

    def run(code, devices=8, processes=1, check=True, timeout=400, **arguments):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        shared = {
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parent.parent),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}",
        }
        started = []
        for i in range(processes):
            own = {}
            if processes > 1:
                names = dict(JOB_ADDRESSES=address, NUM_PROCESSES=processes, PROCESS_ID=i)
                own = {f"KERAS_DISTRIBUTION_{name}": str(value) for name, value in names.items()}
            command = [sys.executable, "-c", _PREAMBLE + code, json.dumps(arguments)]
            pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            started.append(subprocess.Popen(command, env={**shared, **own}, **pipes))
        found = []
        try:
            for process in started:
                output, _ = process.communicate(timeout=timeout)
                reports = [line[7:] for line in output.splitlines() if line.startswith("REPORT ")]
                values = {name: value for line in reports for name, value in json.loads(line).items()}
                found.append({**values, "returncode": process.returncode, "output": output})
        finally:
            for process in started:
                process.kill()
                process.communicate()
        if check and any(one["returncode"] for one in found):
            pytest.fail("\n\n".join(f"process {i}:\n{one['output'][-5000:]}" for i, one in enumerate(found)))
        return found

    return run
