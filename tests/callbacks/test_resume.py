"""A run that was killed and run again equals one that was not, to the last bit."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import keras_qwen as kq

from .training_script import DATA, main

SCRIPT = Path(__file__).parent / "training_script.py"
STEPS = 12


def run(folder, kind, when=""):
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(kq.__file__).parent.parent),
        "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    command = [sys.executable, str(SCRIPT), str(folder), kind, when]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def outcome(folder):
    """Loss of each step, by step; final weights; history."""
    lines = [line.split() for line in (folder / "losses.txt").read_text().splitlines()]
    losses = {(int(epoch), int(batch)): (loss, norm) for epoch, batch, loss, norm in lines}
    weights = list(np.load(folder / "weights.npz").values())
    return losses, weights, json.loads((folder / "history.json").read_text())


def assert_equal(found, expected):
    assert found[0] == expected[0] and len(found[0]) == STEPS
    for a, b in zip(found[1], expected[1], strict=True):
        np.testing.assert_array_equal(a, b)
    assert found[2] == expected[2] and found[2][0] == [0, 1, 2]


def folder_of(path, name):
    (path / name).mkdir()
    return path / name


def test_killed_at_three_points_one_of_them_during_a_save(tmp_path):
    killed = folder_of(tmp_path, "killed")
    reached = []
    for when in ("step:2", "save:2", "step:8", ""):
        result = run(killed, "arrays", when)
        assert result.returncode == (-signal.SIGKILL if when else 0), result.stderr
        reached.append("going on after step" in result.stdout)
    assert reached == [False, False, True, True]  # the second one began anew: no save before step 3
    assert sorted(path.name for path in (killed / "run").iterdir()) == ["step_00000009", "step_00000012"]
    straight = folder_of(tmp_path, "straight")
    main(straight, "arrays")
    assert_equal(outcome(killed), outcome(straight))


class Stop(Exception):
    pass


class StopAt(keras.callbacks.Callback):
    def __init__(self, step):
        super().__init__()
        self.step = step

    def on_train_batch_end(self, batch, logs=None):
        self.step -= 1
        if not self.step:
            raise Stop


@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # Keras says so of every dataset without a length
@pytest.mark.parametrize("kind", [kind for kind in DATA if kind != "arrays"])
def test_every_kind_of_data_goes_on_within_an_epoch(kind, tmp_path):
    if kind == "tf.data":
        pytest.importorskip("tensorflow")
    for name, stops in (("straight", ()), ("stopped", (5,))):
        folder = folder_of(tmp_path, name)
        for stop in stops:
            with pytest.raises(Stop):
                main(folder, kind, more=[StopAt(stop)])
        main(folder, kind)
    assert_equal(outcome(tmp_path / "stopped"), outcome(tmp_path / "straight"))
