"""What every test shares: the backend's choice, seeds, and the golden data."""

import importlib.util
import os
import random
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

import keras
import numpy as np
import pytest

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
