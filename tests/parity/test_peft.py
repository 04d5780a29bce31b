"""Live, beside peft: adapters that we save compute the same there, and what it saves computes the same here."""

import keras
import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from keras_qwen import QwenCausalLM, QwenConfig

# What peft says of transformers and of a base whose weights nobody trained is not about us.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
]
CONFIG = QwenConfig(
    model_type="qwen3", vocab_size=157, hidden_size=48, intermediate_size=72, num_hidden_layers=3,
    num_attention_heads=6, num_key_value_heads=2, head_dim=8, max_position_embeddings=64, initializer_range=0.2,
    tie_word_embeddings=True,
)  # fmt: skip
IDS = np.random.default_rng(0).integers(0, 157, (2, 12)).astype("int32")
KINDS = {
    "lora": dict(rank=4, alpha=8),
    "rslora on two": dict(rank=4, alpha=8, use_rslora=True, targets=["q_proj", "down_proj"]),
    "dora": dict(rank=4, alpha=2, use_dora=True),
    "patterns": dict(rank=4, rank_pattern={"q_proj": 2}, alpha_pattern={"layers.1.mlp.up_proj": 16}),
    "modules_to_save": dict(rank=2, targets=["v_proj"], modules_to_save=["embed_tokens"]),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    QwenCausalLM(CONFIG, dtype="float32").save_pretrained(folder)
    return folder


def load(base):
    return QwenCausalLM.from_pretrained(base, dtype="float32")


def theirs(model):
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor(IDS, dtype=torch.long)).logits.numpy()


def ours(model):
    return keras.ops.convert_to_numpy(model({"token_ids": IDS}))


def scramble(variables):
    """Values that matter, in the place of an adapter's first ones."""
    for i, variable in enumerate(variables):
        variable.assign(variable + np.random.default_rng(i).normal(0, 0.1, variable.shape).astype("float32"))


@pytest.mark.parametrize("kind", KINDS)
def test_what_we_save_computes_the_same_there(base, tmp_path, kind):
    model = load(base)
    plain = ours(model)
    model.enable_lora(**KINDS[kind])
    scramble(model.trainable_variables)
    model.save_adapter(tmp_path / "adapter")
    there = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
    expected = theirs(there)
    assert np.abs(expected - plain).max() > 0.01
    np.testing.assert_allclose(ours(model), expected, atol=1e-4)
    model.merge_adapter()
    model.save_pretrained(tmp_path / "merged")
    np.testing.assert_allclose(theirs(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), expected, atol=1e-4)


@pytest.mark.parametrize("settings", [{}, {"use_rslora": True}, {"use_dora": True}], ids=["lora", "rslora", "dora"])
def test_what_they_save_computes_the_same_here(base, tmp_path, settings):
    config = LoraConfig(r=3, lora_alpha=6, target_modules="all-linear", init_lora_weights=False, **settings)
    there = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    there.save_pretrained(tmp_path)
    model = load(base)
    model.load_adapter(tmp_path)
    np.testing.assert_allclose(ours(model), theirs(there), atol=1e-4)
