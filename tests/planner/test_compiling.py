"""The compiler's account of a plan."""

import importlib.util

import keras
import pytest

import keras_qwen as kq
from keras_qwen.planner import compiling

pytestmark = pytest.mark.skipif(keras.backend.backend() != "jax", reason="compiled by JAX; once is enough")

CONFIG = kq.QwenConfig(
    model_type="qwen2", vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
)  # fmt: skip


def test_arguments_are_what_the_estimate_counts():
    plan = kq.plan(CONFIG, mesh={"fsdp": 2, "model": 2}, batch_size=4, sequence_length=64, sequence_parallel=True)
    step = plan.compile("cpu")
    held = plan.categories["weights"] + plan.categories["optimizer"]
    batch = 3 * 4 * 4 * 64 // 2
    assert held + batch <= step.argument_bytes <= held + batch + 4096  # learning rate, counters, running means
    assert step.alias_bytes == pytest.approx(held, abs=4096)  # the state is updated where it lies
    assert step.total_bytes == step.argument_bytes + step.temp_bytes + step.output_bytes - step.alias_bytes
    assert {axis for one in step.collectives for axis in one.axes} == {"fsdp", "model"}
    assert "estimated" in str(step)


def test_adapters_on_quantised_bases_compile():
    plan = kq.plan(CONFIG, batch_size=2, sequence_length=32, lora_rank=4, quantization="nf4")
    step = plan.compile("cpu")
    held = plan.categories["weights"] + plan.categories["optimizer"]
    assert step.argument_bytes == pytest.approx(held, rel=0.05)


def test_unknown_topology_and_missing_libtpu(monkeypatch):
    plan = kq.plan(CONFIG)
    if importlib.util.find_spec("libtpu") is None:
        with pytest.raises(ImportError, match=r"libtpu.*keras-qwen\[planner\]"):
            plan.compile("v5p:2x2x4")
    monkeypatch.setattr(compiling, "_has", lambda name: True)
    with pytest.raises(ValueError, match="topology 'v99:1x1'"):
        plan.compile("v99:1x1")
