"""A mesh of TensorFlow's DTensor against one device: losses, weights, logits, tokens, and what lies where."""

import json

import keras
import numpy as np
import pytest

import keras_qwen as kq
from tests.distribution.started import result_of, start

if keras.backend.backend() != "tensorflow":
    pytest.skip("the TensorFlow side", allow_module_level=True)

SHAPE = dict(
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=64,
    initializer_range=0.2,
    max_position_embeddings=128,
)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, settings in {
        "tied": dict(model_type="qwen2", tie_word_embeddings=True),
        "untied": dict(model_type="qwen3"),
    }.items():
        keras.utils.set_random_seed(1)
        kq.QwenCausalLM(kq.QwenConfig(**SHAPE, **settings)).save_pretrained(folder / name)
    return folder


def assert_same(one, several, path=""):
    assert one.keys() <= several.keys(), path
    for name, value in one.items():
        if isinstance(value, dict):
            assert_same(value, several[name], f"{path}/{name}")
        else:
            # A key's bias has gradients of 0, but for rounding, which Adam's steps of 1e-2 divide by its own size.
            limit = 2e-2 if name.endswith("k_proj/bias") else 3e-5
            np.testing.assert_allclose(several[name], value, atol=limit, rtol=1e-5, err_msg=f"{path}/{name}")


@pytest.mark.parametrize(
    ("checkpoint", "mesh", "case"),
    [
        ("tied", {"data": 2, "model": 2}, "full"),
        ("untied", {"fsdp": 2, "model": 2}, "adapter"),
        ("tied", {"fsdp": 2, "model": 2}, "preference"),
        ("untied", {"data": 2, "model": 2}, "generate"),
    ],
)
def test_numbers_are_those_of_one_device(checkpoints, checkpoint, mesh, case):
    meshes = [{}, mesh]
    started = [start("checks_tensorflow.py", checkpoints / checkpoint, json.dumps(m), case) for m in meshes]
    one, several = map(result_of, started)
    assert_same(one, several)
    if case == "full":
        split = several["split"]
        assert split["matrices"] == split["all"] // 2
        assert split["moments"] == 2 * split["all"] // 4  # over `model` and, with shard_optimizer, over `data`
        assert split["report"] == split["local"]


def test_optimizers_step_as_on_one_device():
    differences = result_of(start("optimizers_on_mesh.py"))
    assert len(differences) >= 17
    wrong = {name: steps for name, steps in differences.items() if len(steps) != 4 or not max(steps) <= 1e-5}
    assert wrong == {}


class TestRefused:
    """What does not work on TensorFlow says so, and what to do."""

    config = kq.QwenConfig(model_type="qwen2", **SHAPE)

    def test_a_batch_over_two_axes(self):
        mesh = keras.distribution.DeviceMesh((2, 2), ("data", "fsdp"), [f"cpu:{i}" for i in range(4)])
        with pytest.raises(ValueError, match="data=4 or fsdp=4"):
            kq.distribution.model_parallel(self.config, mesh)

    def test_two_axes_of_one_dimension_are_reported(self):
        mesh = keras.distribution.DeviceMesh((3, 2), ("fsdp", "model"), [f"cpu:{i}" for i in range(6)])
        config = kq.QwenConfig(model_type="qwen2", **{**SHAPE, "vocab_size": 66, "hidden_size": 16})
        layouts = kq.distribution.layout_map(config, mesh)
        (pattern,) = (p for p in layouts if p.endswith("embed_tokens/embeddings"))
        assert layouts[pattern].axes == ("model", None)
        assert "a second axis of one dimension, fsdp" in layouts.notes[pattern]

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()), "mixed_bfloat16"),
            (lambda: keras.optimizers.Adam(gradient_accumulation_steps=2), "micro_batch_size"),
            (lambda: keras.optimizers.Adam(use_ema=True, ema_overwrite_frequency=2), "ema_overwrite_frequency"),
        ],
    )
    def test_optimizers_with_branches(self, make, message):
        mesh = keras.distribution.DeviceMesh((1,), ("model",), ["cpu:0"])
        with pytest.raises(ValueError, match=message):
            kq.distribution.model_parallel(self.config, mesh).check_optimizer(make())

    def test_an_optimizer_from_before(self):
        optimizer = keras.optimizers.Adam()
        mesh = keras.distribution.DeviceMesh((1,), ("model",), ["cpu:0"])
        with pytest.raises(ValueError, match="iteration was made before this distribution was set"):
            kq.distribution.model_parallel(self.config, mesh).check_optimizer(optimizer)

    def test_a_base_of_fewer_than_8_bits(self, checkpoints):
        mesh = keras.distribution.DeviceMesh((1,), ("model",), ["cpu:0"])
        with kq.distribution.model_parallel(self.config, mesh).scope():
            with pytest.raises(ValueError, match="'nf4' does not work on a TensorFlow mesh.*'int8'"):
                kq.QwenCausalLM.from_pretrained(checkpoints / "tied", quantization="nf4")

    def test_other_attention_and_xla(self):
        mesh = keras.distribution.DeviceMesh((1,), ("model",), ["cpu:0"])
        with kq.distribution.model_parallel(self.config, mesh).scope():
            with pytest.raises(ValueError, match="dense form only"):
                kq.QwenCausalLM(self.config, attention="blockwise").attention_summary(8)
            with pytest.raises(ValueError, match="jit_compile=True"):
                kq.QwenCausalLM(self.config).compile(jit_compile=True)
