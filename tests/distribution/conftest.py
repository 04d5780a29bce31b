"""A checkpoint small enough to be trained in many ways."""

import keras
import pytest

import keras_qwen as kq


@pytest.fixture(scope="session")
def small_checkpoint(tmp_path_factory):
    """The folder of a model with one layer."""
    keras.utils.clear_session(free_memory=False)
    config = kq.QwenConfig(
        model_type="qwen2", vocab_size=280, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("small") / "checkpoint"
    kq.QwenCausalLM(config, dtype="float32").save_pretrained(folder)
    return str(folder)
