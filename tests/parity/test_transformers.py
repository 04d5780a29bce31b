"""Live, beside transformers: what we save loads there and computes the same; what it saves loads here."""

import keras
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from keras_qwen import QwenCausalLM, QwenConfig

SHAPE = dict(
    vocab_size=157, hidden_size=48, intermediate_size=72, num_hidden_layers=3, num_attention_heads=6,
    num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2,
)  # fmt: skip
IDS = np.random.default_rng(0).integers(0, 157, (2, 12)).astype("int32")


def theirs(folder_or_model):
    model = folder_or_model
    if not isinstance(model, torch.nn.Module):
        model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    model.eval()
    with torch.no_grad():
        return model(input_ids=torch.tensor(IDS, dtype=torch.long)).logits.numpy()


def ours(model):
    return keras.ops.convert_to_numpy(model({"token_ids": IDS}))


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                          "original_max_position_embeddings": 8}},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 8},
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ],
    ids=["default", "llama3", "dynamic", "sliding"],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:A row has 12 tokens")
def test_what_we_save_computes_the_same_there(tmp_path, model_type, tied, more):
    config = QwenConfig(**SHAPE | dict(model_type=model_type, tie_word_embeddings=tied, head_dim=8) | more)
    model = QwenCausalLM(config, dtype="float32")
    model.save_pretrained(tmp_path, max_shard_size=50_000)
    np.testing.assert_allclose(ours(model), theirs(tmp_path), atol=3e-5)


@pytest.mark.parametrize("config, cls", [(Qwen2Config, Qwen2ForCausalLM), (Qwen3Config, Qwen3ForCausalLM)])
def test_what_they_save_computes_the_same_here(tmp_path, config, cls):
    torch.manual_seed(0)
    model = cls(config(**SHAPE, head_dim=8, attn_implementation="eager"))
    model.save_pretrained(tmp_path)
    np.testing.assert_allclose(ours(QwenCausalLM.from_pretrained(tmp_path, dtype="float32")), theirs(model), atol=3e-5)


def test_greedy_continuations_agree(tmp_path):
    model = QwenCausalLM(QwenConfig(**SHAPE), dtype="float32")
    model.save_pretrained(tmp_path)
    peer = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for row in IDS:
        prompt = torch.tensor(row[None, :7], dtype=torch.long)
        out = peer.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=10, do_sample=False, pad_token_id=0
        )
        new = model.generate([row[:7].tolist()], max_new_tokens=10, temperature=0.0, stop=[])
        assert new[0] == out[0, 7:].tolist()
