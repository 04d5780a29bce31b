"""`data_parallel` on TensorFlow against one device: replicas in one process, and processes of which one is killed."""

import json
import socket

import keras
import numpy as np
import pytest

import keras_qwen as kq
from tests.distribution.started import finish, result_of, start

if keras.backend.backend() != "tensorflow":
    pytest.skip("the TensorFlow side", allow_module_level=True)

SCRIPT = "replicas_tensorflow.py"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    keras.utils.set_random_seed(1)
    config = kq.QwenConfig(
        model_type="qwen3",
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        initializer_range=0.2,
    )
    folder = tmp_path_factory.mktemp("checkpoint")
    kq.QwenCausalLM(config).save_pretrained(folder)
    return folder


def assert_same(one, several):
    for name, values in one["weights"].items():
        np.testing.assert_allclose(several["weights"][name], values, atol=2e-5, err_msg=name)
    assert one["history"].keys() == several["history"].keys()
    for name, values in one["history"].items():
        np.testing.assert_allclose(several["history"][name], values, rtol=1e-5, err_msg=name)


def test_replicas_give_the_numbers_of_one_device(checkpoint):
    one, several = map(result_of, [start(SCRIPT, checkpoint, 1), start(SCRIPT, checkpoint, 2)])
    assert_same(one, several)
    np.testing.assert_allclose(several["evaluate"], one["evaluate"], rtol=1e-5)
    assert len(one["steps"]) == 6
    for step, expected in zip(several["steps"], one["steps"], strict=True):
        assert step == pytest.approx(expected, rel=1e-5)


def workers(checkpoint, folder, die_after=None):
    """Two processes on loopback; the second one kills itself after so many steps."""
    sockets = [socket.socket() for _ in range(2)]
    for opened in sockets:
        opened.bind(("127.0.0.1", 0))
    addresses = [f"127.0.0.1:{opened.getsockname()[1]}" for opened in sockets]
    for opened in sockets:
        opened.close()
    started = []
    for index in range(2):
        config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        dies = [die_after] if die_after and index == 1 else []
        started.append(start(SCRIPT, checkpoint, "workers", folder / str(index), *dies, TF_CONFIG=json.dumps(config)))
    return started


def test_killed_and_restarted_workers_give_the_numbers_of_one_device(checkpoint, tmp_path):
    alone = start(SCRIPT, checkpoint, 1, tmp_path / "unused")
    first, second = workers(checkpoint, tmp_path, die_after=3)
    assert finish(second)[0] == -9
    code, _, errors = finish(first)  # it does not hang
    assert code != 0 and "Error" in errors
    one = result_of(alone)
    for several in map(result_of, workers(checkpoint, tmp_path)):
        assert_same(one, several)
        assert 3 <= len(several["steps"]) < 6  # it went on, and did not begin anew


def test_bad_settings_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="devices=99: there are"):
        kq.distribution.data_parallel(None, devices=99)
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"worker": ["a:1", "b:1"]}}))
    with pytest.raises(ValueError, match="leave out devices="):
        kq.distribution.data_parallel(None, devices=2)
