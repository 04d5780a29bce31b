"""Adapters on a model: PEFT's numbers, training, switching, merging, saving."""

import dataclasses

import keras
import numpy as np
import pytest
from safetensors.numpy import load_file

from keras_qwen import QwenCausalLM, QwenConfig

ADAPTERS = {"lora_qwen2_tied": "qwen2_tied", "rslora_qwen3": "qwen3", "dora_qwen3_tied": "qwen3_tied"}
CONFIG = QwenConfig(
    model_type="qwen2", vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3, tie_word_embeddings=False,
)  # fmt: skip
IDS = np.random.default_rng(0).integers(0, 61, (4, 9)).astype("int32")
INPUTS = {"token_ids": IDS}


def numpy(x):
    return keras.ops.convert_to_numpy(keras.ops.cast(x, "float32"))


def make(tied=False, **arguments):
    return QwenCausalLM(dataclasses.replace(CONFIG, tie_word_embeddings=tied), **{"dtype": "float32", **arguments})


def train(model, epochs=2, optimizer=None):
    if optimizer is not None:
        model.compile(optimizer)
    return model.fit(INPUTS, IDS, batch_size=4, epochs=epochs, shuffle=False, verbose=0).history["loss"]


def base_values(model):
    return {v.path: numpy(v) for v in model.weights if "lora" not in v.path}


def assert_same(before, after):
    assert before.keys() == after.keys()
    for path, value in before.items():
        np.testing.assert_array_equal(value, after[path], err_msg=path)


@pytest.mark.parametrize("micro_batch_size", [None, 1])
@pytest.mark.parametrize("name", ADAPTERS)
def test_logits_loss_and_gradients_are_pefts(name, micro_batch_size, reference_folder, tmp_path):
    folder = reference_folder("adapters") / name
    want, start = np.load(folder / "expected.npz"), load_file(folder / "adapter_model.safetensors")
    model = QwenCausalLM.from_pretrained(reference_folder(ADAPTERS[name]), dtype="float32")
    model.load_adapter(folder)
    ids = want["input_ids"]
    np.testing.assert_allclose(numpy(model({"token_ids": ids})), want["logits"], atol=3e-5, rtol=0)
    labels = np.concatenate([ids[:, 1:], np.full_like(ids[:, :1], -100)], axis=1)
    before = base_values(model)
    model.compile(keras.optimizers.SGD(1.0), micro_batch_size=micro_batch_size)
    loss = model.fit({"token_ids": ids}, labels, batch_size=2, shuffle=False, verbose=0).history["loss"][0]
    np.testing.assert_allclose(loss, float(want["train_loss"]), rtol=1e-5)
    assert_same(before, base_values(model))
    model.save_adapter(tmp_path)
    trained = load_file(tmp_path / "adapter_model.safetensors")
    for key in (key for key in want.files if key.startswith("grad/")):
        found, expected = start[key[5:]] - trained[key[5:]], want[key]
        assert np.linalg.norm(found - expected) <= 1e-4 * np.linalg.norm(expected), key


@pytest.mark.parametrize("when", ["before compile", "after compile", "after fit"])
def test_enable_lora_trains_the_adapter_whenever_it_is_called(when):
    model, optimizer = make(), keras.optimizers.Adam(0.02)
    if when != "before compile":
        model.compile(optimizer)
    if when == "after fit":
        train(model)
    model.enable_lora(4)
    if when == "after fit":
        with pytest.raises(ValueError, match="call compile again"):
            train(model)
    before = base_values(model)
    losses = train(model, epochs=4, optimizer=None if when == "after compile" else keras.optimizers.Adam(0.02))
    assert losses[-1] < losses[0] - 0.1
    assert_same(before, base_values(model))
    assert all("lora" in v.path for v in model.trainable_variables)
    assert np.abs(numpy(model.blocks[1].mlp.down_proj.adapter.B)).max() > 0.01


@pytest.mark.parametrize("remat", [None, "block", "attention", "mlp"])
def test_dropout_is_the_same_when_it_is_recomputed(remat):
    results = []
    for policy in (None, remat):
        keras.utils.clear_session(free_memory=False)
        np.random.seed(0)
        model = make(remat=policy)
        model.set_weights([np.random.default_rng(i).normal(0, 0.2, v.shape) for i, v in enumerate(model.weights)])
        model.enable_lora(3, dropout=0.4, alpha=6)
        for i, v in enumerate(model.trainable_variables):
            v.assign(np.random.default_rng(i).normal(0, 0.2, v.shape))
        for i, v in enumerate(v for v in model.variables if v.path.endswith("seed_generator_state")):
            v.assign(np.array([i, 7], "uint32"))
        train(model, epochs=2, optimizer=keras.optimizers.SGD(0.5))
        results.append([numpy(v) for v in model.trainable_variables])
    for expected, found in zip(*results, strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-5)


def test_several_adapters_on_one_base(tmp_path):
    model = make()
    plain = numpy(model(INPUTS))
    found = {}
    for name, rank in (("first", 2), ("second", 3)):
        model.enable_lora(rank, name=name, targets=["q_proj", "down_proj"])
        np.testing.assert_array_equal(numpy(model(INPUTS)), plain)
        train(model, optimizer=keras.optimizers.Adam(0.05))
        found[name] = numpy(model(INPUTS))
        assert {v.path.split("/")[-2] for v in model.trainable_variables} == {f"lora_{name}"}
    assert model.adapters == ["first", "second"] and model.active_adapter == "second"
    for name in ("first", "second", "first"):
        model.set_adapter(name)
        np.testing.assert_array_equal(numpy(model(INPUTS)), found[name])
        np.testing.assert_allclose(model.predict(INPUTS, verbose=0), found[name], atol=1e-5)
    model.set_adapter(None)
    np.testing.assert_array_equal(numpy(model(INPUTS)), plain)
    model.save_adapter(tmp_path, "second")
    model.delete_adapter("second")
    model.load_adapter(tmp_path, name="third")
    np.testing.assert_array_equal(numpy(model(INPUTS)), found["second"])
    assert model.adapters == ["first", "third"]


def test_disable_adapter_also_in_compiled_functions():
    model = make()
    plain = numpy(model(INPUTS))
    prompts = IDS[:1, :3].tolist()
    plain_text = model.generate(prompts, max_new_tokens=6, temperature=0)
    model.enable_lora(4, alpha=40)
    train(model, epochs=5, optimizer=keras.optimizers.Adam(0.05))
    trained, text = model.predict(INPUTS, verbose=0), model.generate(prompts, max_new_tokens=6, temperature=0)
    assert np.abs(trained - plain).max() > 0.1 and text != plain_text
    for _ in range(2):
        with model.disable_adapter():
            np.testing.assert_allclose(model.predict(INPUTS, verbose=0), plain, atol=1e-5)
            assert model.generate(prompts, max_new_tokens=6, temperature=0) == plain_text
        np.testing.assert_array_equal(model.predict(INPUTS, verbose=0), trained)
        assert model.generate(prompts, max_new_tokens=6, temperature=0) == text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.filterwarnings("ignore:The weights are bfloat16")
def test_merge_and_unmerge(use_dora, dtype, tmp_path):
    model = make(dtype=dtype)
    model.enable_lora(4, alpha=8, use_dora=use_dora)
    train(model, optimizer=keras.optimizers.Adam(0.02))
    adapted, base = numpy(model(INPUTS)), base_values(model)
    with pytest.raises(ValueError, match="merge_adapter first.*save_adapter"):
        model.save_pretrained(tmp_path)
    model.merge_adapter()
    tolerance = 1e-4 if dtype == "float32" else 0.1 * np.abs(adapted).max()
    np.testing.assert_allclose(numpy(model(INPUTS)), adapted, atol=tolerance)
    merged = numpy(model(INPUTS))
    model.save_pretrained(tmp_path)
    again = QwenCausalLM.from_pretrained(tmp_path, dtype=dtype)
    np.testing.assert_array_equal(numpy(again(INPUTS)), merged)
    assert not any("lora" in name for name in load_file(tmp_path / "model.safetensors"))
    with pytest.raises(ValueError, match="merged: call unmerge_adapter"):
        train(model)
    for action in (model.merge_adapter, lambda: model.set_adapter("default"), lambda: model.enable_lora(2, name="x")):
        with pytest.raises(ValueError, match="is merged; call unmerge_adapter first"):
            action()
    model.unmerge_adapter()
    assert_same(base, base_values(model))
    np.testing.assert_array_equal(numpy(model(INPUTS)), adapted)
    train(model, epochs=1)
    with pytest.raises(ValueError, match="No adapter is merged"):
        model.unmerge_adapter()
    model.merge_adapter(keep_base=False)
    with pytest.raises(ValueError, match="was not kept"):
        model.unmerge_adapter()


@pytest.mark.parametrize("merged", [False, True])
def test_keras_files_keep_adapters(merged, tmp_path):
    model = make()
    model.enable_lora(2, name="first", dropout=0.1)
    model.enable_lora(4, name="second", use_dora=True, rank_pattern={"q_proj": 2}, modules_to_save="lm_head")
    train(model, optimizer=keras.optimizers.Adam(0.02))
    if merged:
        model.merge_adapter()
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(numpy(again(INPUTS)), numpy(model(INPUTS)))
    assert again.adapters == ["first", "second"] and again.active_adapter == "second"
    assert again.adapter_is_merged is merged
    assert [v.path for v in again.trainable_variables] == [v.path for v in model.trainable_variables]
    if not merged:
        assert train(again, epochs=1) == train(model, epochs=1)
        again.set_adapter("first")


@pytest.mark.parametrize("tied", [False, True])
def test_modules_to_save(tied, tmp_path):
    model = make(tied)
    plain, base = numpy(model(INPUTS)), base_values(model)
    modules = ["embed_tokens"] if tied else ["embed_tokens", "lm_head"]
    model.enable_lora(2, targets=["v_proj"], modules_to_save=modules)
    np.testing.assert_array_equal(numpy(model(INPUTS)), plain)
    train(model, optimizer=keras.optimizers.Adam(0.02))
    trained = numpy(model(INPUTS))
    assert_same(base, base_values(model))
    moved = numpy(model.backbone.embed_tokens.current_weight) - base["embed_tokens/embeddings"]
    assert np.abs(moved).max() > 0.01
    with model.disable_adapter():
        np.testing.assert_array_equal(numpy(model(INPUTS)), plain)
    prompts = IDS[:1, :4].tolist()
    text = model.generate(prompts, max_new_tokens=4, temperature=0)

    model.save_adapter(tmp_path / "adapter")
    names = load_file(tmp_path / "adapter" / "adapter_model.safetensors").keys()
    assert "base_model.model.model.embed_tokens.weight" in names
    assert "base_model.model.lm_head.weight" in names  # peft asks for it of tied models, too
    model.merge_adapter()
    np.testing.assert_allclose(numpy(model(INPUTS)), trained, atol=1e-5)
    assert model.generate(prompts, max_new_tokens=4, temperature=0) == text
    model.save_pretrained(tmp_path / "merged")
    again = QwenCausalLM.from_pretrained(tmp_path / "merged", dtype="float32")
    np.testing.assert_allclose(numpy(again(INPUTS)), trained, atol=1e-5)
    model.unmerge_adapter()
    assert_same(base, base_values(model))
    model.delete_adapter("default")
    model.load_adapter(tmp_path / "adapter")
    np.testing.assert_array_equal(numpy(model(INPUTS)), trained)


def test_tied_modules_to_save_may_be_untied(tmp_path):
    """PEFT without ensure_weight_tying: embeddings of the adapter's own, the head's those of the base."""
    model = make(tied=True)
    model.enable_lora(2, targets=["v_proj"], modules_to_save=["embed_tokens"])
    model.save_adapter(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(file.read_text().replace('"ensure_weight_tying": true', '"ensure_weight_tying": false'))
    model.delete_adapter("default")
    model.load_adapter(tmp_path)
    train(model, optimizer=keras.optimizers.Adam(0.02))
    embed = model.backbone.embed_tokens
    assert np.abs(numpy(embed.current_weight) - numpy(embed.embeddings)).max() > 0.01
    expected = numpy(model.backbone(INPUTS)) @ numpy(embed.embeddings).T
    np.testing.assert_allclose(numpy(model(INPUTS)), expected, atol=1e-4)
    with pytest.raises(ValueError, match="no merged checkpoint"):
        model.merge_adapter()


def test_names_and_missing_adapters():
    model = make()
    for name in ("", "a.b", "a/b", None):
        with pytest.raises(ValueError, match="name"):
            model.enable_lora(2, name=name)
    for action in (model.merge_adapter, lambda: model.save_adapter("nowhere")):
        with pytest.raises(ValueError, match="No adapter is active"):
            action()
    model.enable_lora(2)
    with pytest.raises(ValueError, match="'default' already"):
        model.enable_lora(4)
    for action in (model.set_adapter, model.delete_adapter):
        with pytest.raises(ValueError, match="no adapter 'other'; there are default"):
            action("other")
    model.set_adapter(None)
    with pytest.raises(ValueError, match="set_adapter chooses one of default"):
        train(model, optimizer=keras.optimizers.SGD(0.1))
    with pytest.raises(ValueError, match="unknown|matches no projection"):
        model.enable_lora(2, name="other", targets=["c_attn"])
    assert model.adapters == ["default"]


def test_push_adapter_to_hub(monkeypatch):
    pushed = {}

    def push(save, repo_id, **options):
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            save(f"{folder}/checkpoint")
            pushed.update(repo_id=repo_id, files=sorted(load_file(f"{folder}/checkpoint/adapter_model.safetensors")))
        return "address"

    monkeypatch.setattr("keras_qwen.models.adapters.hub.push", push)
    model = make()
    model.enable_lora(2, targets=["layers.0.mlp.up_proj"])
    assert model.push_adapter_to_hub("me/adapter") == "address"
    assert pushed == {
        "repo_id": "me/adapter",
        "files": [f"base_model.model.model.layers.0.mlp.up_proj.lora_{x}.weight" for x in "AB"],
    }
