"""Which implementation of attention is chosen, and with what blocks."""

import keras
import numpy as np
import pytest

from keras_qwen.ops.attention import choose_implementation
from keras_qwen.ops.attention_choice import choose_block_sizes


@pytest.mark.parametrize(
    "backend, device, length, arguments, expected",
    [
        ("tensorflow", "cpu", 256, {}, "dense"),
        ("tensorflow", "cpu", 257, {}, "blockwise"),
        ("tensorflow", "gpu", 4096, dict(dtype="bfloat16"), "blockwise"),
        ("tensorflow", "cpu", None, {}, "blockwise"),
        ("tensorflow", "cpu", 4096, dict(dropout=0.1), "dense"),
        ("jax", "cpu", 4096, {}, "blockwise"),
        ("jax", "cpu", 1, dict(key_length=4096, has_mask=True), "dense"),
        ("jax", "gpu", 4096, {}, "blockwise"),
        ("jax", "gpu", 4096, dict(dtype="bfloat16"), "flash"),
        ("jax", "gpu", 128, dict(dtype="bfloat16"), "dense"),
        ("jax", "gpu", 4097, dict(dtype="bfloat16"), "blockwise"),
        ("jax", "gpu", 4096, dict(dtype="bfloat16", head_dim=256), "blockwise"),
        ("jax", "gpu", 4096, dict(dtype="bfloat16", has_key_segments=True), "blockwise"),
        ("jax", "tpu", 4096, {}, "flash"),
        ("jax", "tpu", 4000, {}, "blockwise"),
        ("torch", "cpu", 64, {}, "flash"),
        ("torch", "gpu", 64, dict(has_mask=True), "dense"),
    ],
)
def test_auto(backend, device, length, arguments, expected):
    assert choose_implementation(backend=backend, device=device, length=length, **arguments) == expected


@pytest.mark.parametrize(
    "backend, device, arguments, words",
    [
        ("tensorflow", "gpu", {}, "TensorFlow has no fused"),
        ("jax", "cpu", {}, "for the CPU"),
        ("jax", "gpu", {}, "takes float16 and bfloat16, not float32"),
        ("jax", "gpu", dict(dtype="float16", head_dim=20), "head_dim .* not 20"),
        ("jax", "gpu", dict(dtype="float16", length=5), "even length, not 5"),
        ("jax", "tpu", dict(length=100), "multiple of 128, not 100"),
    ],
)
def test_what_flash_lacks(backend, device, arguments, words):
    with pytest.raises(ValueError, match=f"{words}.*Available are auto, dense and blockwise"):
        choose_implementation(implementation="flash", backend=backend, device=device, **{"length": 64, **arguments})


def test_what_was_asked_for_is_taken():
    assert choose_implementation(implementation="dense", length=9999) == "dense"
    assert choose_implementation(implementation="blockwise", length=1) == "blockwise"


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="of JAX")
def test_old_gpu(monkeypatch):
    import jax

    class Device:
        compute_capability = "7.5"

    monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
    assert choose_implementation(device="gpu", length=4096, dtype="float16") == "blockwise"


def test_block_sizes():
    assert choose_block_sizes(None, (1, 2048, 14, 64), 2048, "cpu") == (128, 256)
    assert choose_block_sizes(None, (1, 300, 14, 64), 300, "cpu") == (112, 160), "the last block is nearly full"
    assert choose_block_sizes(None, (1, 20, 14, 64), 20, "cpu") == (20, 20)
    assert choose_block_sizes(None, (None, None, 14, 64), None, "cpu") == (128, 256)
    assert choose_block_sizes(None, (64, 2048, 14, 64), 2048, "cpu") == (64, 64)
    assert choose_block_sizes(None, (1, 2048, 14, 64), 2048, "gpu") == (512, 512)
    assert choose_block_sizes(np.int64(7), (1, 20, 2, 4), 20) == (7, 7)
    assert choose_block_sizes((3, 5), (1, 20, 2, 4), 20) == (3, 5)
