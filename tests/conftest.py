"""What every test shares: the backend's choice, seeds, and the golden data."""

import importlib.util
import os
import random
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before TensorFlow is imported: no banners among the results
os.environ.setdefault("MPLBACKEND", "agg")

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
