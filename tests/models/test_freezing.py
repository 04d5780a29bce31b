"""What is trained may change at any time, and fit follows or says why not."""

import keras
import numpy as np
import pytest

from keras_qwen import QwenCausalLM, QwenConfig

CONFIG = QwenConfig(
    model_type="qwen2", vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3, tie_word_embeddings=False,
)  # fmt: skip
IDS = np.random.default_rng(0).integers(0, 61, (4, 9)).astype("int32")


@pytest.fixture
def model():
    return QwenCausalLM(CONFIG, dtype="float32")


def moved(model, **fit):
    """The paths of the variables that a step changes."""
    before = {v.path: keras.ops.convert_to_numpy(v) for v in model.weights}
    model.fit({"token_ids": IDS}, IDS, batch_size=4, verbose=0, **fit)
    return {v.path for v in model.weights if np.any(before[v.path] != keras.ops.convert_to_numpy(v))}


def paths(model, start):
    return {v.path for v in model.weights if v.path.startswith(start)}


@pytest.mark.parametrize("loss", [None, keras.losses.SparseCategoricalCrossentropy(from_logits=True)])
def test_layers_that_are_not_trainable_stay_as_they_are(model, loss):
    model.blocks[0].trainable = False
    model.backbone.embed_tokens.trainable = False
    model.compile(keras.optimizers.SGD(0.5), loss=loss)
    frozen = paths(model, "layers_0/") | {"embed_tokens/embeddings"}
    assert moved(model) == {v.path for v in model.weights} - frozen


def test_frozen_head(model):
    model.lm_head.trainable = False
    model.compile(keras.optimizers.SGD(0.5))
    assert moved(model) == {v.path for v in model.weights} - {"lm_head/kernel"}


def test_patterns(model):
    model.freeze(["embed_tokens", r"layers_1/.*_proj"])
    model.compile(keras.optimizers.SGD(0.5))
    frozen = {"embed_tokens/embeddings"} | {p for p in paths(model, "layers_1/") if "_proj" in p}
    assert moved(model) == {v.path for v in model.weights} - frozen
    model.train_only("norm")
    model.compile(keras.optimizers.SGD(0.5))
    assert moved(model) == {v.path for v in model.weights if "norm" in v.path}


def test_a_pattern_that_matches_nothing(model):
    with pytest.raises(ValueError, match="'layer_0' matches no variable.*embed_tokens/embeddings"):
        model.freeze("layer_0")
    assert len(model.trainable_variables) == len(model.weights)


def test_changes_between_steps(model):
    model.compile(keras.optimizers.SGD(0.5))
    model.optimizer.build(model.trainable_variables)  # built, but without a step: it follows
    model.train_only("layers_0/")
    assert moved(model) == paths(model, "layers_0/")
    model.train_only("layers_1/")
    with pytest.raises(ValueError, match="call compile again"):
        moved(model)
    model.compile(keras.optimizers.SGD(0.5))
    assert moved(model) == paths(model, "layers_1/")
    assert moved(model) == paths(model, "layers_1/")


def test_a_rebuilt_optimizer_keeps_its_settings(model):
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 10, warmup_steps=2, warmup_target=0.3)
    model.compile(keras.optimizers.AdamW(schedule, weight_decay=0.07, global_clipnorm=0.5))
    model.optimizer.build(model.trainable_variables)
    model.freeze("embed_tokens")
    moved(model)
    assert model.optimizer.weight_decay == 0.07 and model.optimizer.global_clipnorm == 0.5
    assert int(model.optimizer.iterations) == 1
    np.testing.assert_allclose(float(model.optimizer.learning_rate), float(schedule(1)), rtol=1e-6)


def test_nothing_to_train(model):
    model.trainable = False
    model.compile(keras.optimizers.SGD(0.5))
    with pytest.raises(ValueError, match="Nothing is trainable"):
        moved(model)


def test_keras_files_keep_what_is_frozen(model, tmp_path):
    model.train_only("layers_1/")
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert [v.path for v in again.trainable_variables] == [v.path for v in model.trainable_variables]
    model.trainable = False
    model.save(tmp_path / "frozen.keras")
    assert keras.saving.load_model(tmp_path / "frozen.keras").trainable_variables == []


def test_norms_may_be_trained_beside_an_adapter(model, tmp_path):
    model.enable_lora(2, targets=["q_proj"])
    model.train_only(["lora", "layers_1/.*norm"])
    model.compile(keras.optimizers.SGD(0.5))
    expected = {v.path for v in model.weights if "/B" in v.path or ("layers_1/" in v.path and "norm" in v.path)}
    assert expected <= moved(model) <= expected | {v.path for v in model.weights if v.path.endswith("/A")}
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert [v.path for v in again.trainable_variables] == [v.path for v in model.trainable_variables]


def test_a_kernel_under_dora_stays_frozen(model):
    model.enable_lora(2, targets=["q_proj"], use_dora=True)
    with pytest.raises(ValueError, match="q_proj.* DoRA"):
        model.train_only(["lora", "q_proj/kernel"])
