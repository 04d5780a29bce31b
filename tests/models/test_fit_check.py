"""What fit says before its first step, and the search for a batch size."""

import warnings

import keras
import numpy as np
import pytest

import keras_qwen as kq
from keras_qwen import devices
from keras_qwen.memory_estimate import USABLE, estimate
from keras_qwen.models.fit_check import setup_of

CONFIG = kq.QwenConfig(
    model_type="qwen2", vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
)  # fmt: skip
IDS = np.random.default_rng(0).integers(0, 128, (8, 65)).astype("int32")


def compiled(optimizer="adamw", micro_batch_size=None, **arguments):
    model = kq.QwenCausalLM(CONFIG, dtype="float32", **arguments)
    model.compile(optimizer, micro_batch_size=micro_batch_size)
    return model


def test_the_setup_is_the_models():
    model = compiled(kq.training.AdamW(1e-3, moments="int8"), micro_batch_size=2, remat="mlp")
    setup = setup_of(model, 8, 64)
    assert (setup.optimizer, setup.micro_batch_size, setup.remat) == ("adamw-int8", 2, "mlp")
    assert (setup.dtype, setup.mesh, setup.lora_rank) == ("float32", {}, None)
    model = compiled(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()))
    model.enable_lora(4)
    assert setup_of(model, 8, 64).lora_rank == 4 and setup_of(model, 8, 64).optimizer == "adam"
    assert setup_of(compiled("adafactor"), 8, 64) is None


def fit_warnings(monkeypatch, model, memory):
    monkeypatch.setattr(devices, "accelerator_memory", lambda: memory)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model.fit(IDS[:, :-1], IDS[:, 1:], batch_size=8, verbose=0)
    return [str(warning.message) for warning in found if "on each device" in str(warning.message)]


def test_fit_names_what_would_fit(monkeypatch):
    model = compiled()
    needed = sum(estimate(setup_of(model, 8, 64)).values())
    assert fit_warnings(monkeypatch, model, int(1.01 * needed / USABLE)) == []
    [text] = fit_warnings(monkeypatch, model, int(0.99 * needed / USABLE))
    assert "8 x 64 tokens needs about" in text and "remat='block'" in text and "would fit" in text
    [text] = fit_warnings(monkeypatch, model, 1000)
    assert "kq.suggest" in text


def test_nothing_is_said_where_nothing_is_known(monkeypatch):
    assert fit_warnings(monkeypatch, compiled(), None) == []


def test_a_batch_size_is_found_and_the_model_is_as_before(monkeypatch):
    model = compiled("adamw")
    model.fit(IDS[:, :-1], IDS[:, 1:], batch_size=8, verbose=0)
    variables = [*model.trainable_variables, *model.optimizer.variables]
    before = [keras.ops.convert_to_numpy(v) for v in variables]
    one = sum(estimate(setup_of(model, 1, 64)).values())
    found = kq.find_batch_size(model, 64, device_memory=8 * one)
    assert found > 1 and sum(estimate(setup_of(model, found, 64)).values()) <= USABLE * 8 * one
    assert sum(estimate(setup_of(model, found + 1, 64)).values()) > USABLE * 8 * one
    for variable, value in zip(variables, before, strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), value)
    assert kq.find_batch_size(model, 64, device_memory=8 * one, limit=3) == 3


def test_a_step_that_fails_halves_it(monkeypatch):
    model, tried = compiled(), []

    def train_on_batch(x, y):
        tried.append(len(y))
        if len(y) > 3:
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate")

    monkeypatch.setattr(model, "train_on_batch", train_on_batch)
    assert kq.find_batch_size(model, 64, device_memory="8GB", limit=12) == 3
    assert tried == [12, 6, 3]
    with pytest.raises(ValueError, match="Not even 1 rows"):
        kq.find_batch_size(model, 64, device_memory=20_000)
    with pytest.raises(ValueError, match="device_memory"):
        kq.find_batch_size(model, 64)
