"""QwenCausalLM as a Keras model: inputs, saving, cloning, remat."""

import warnings

import keras
import numpy as np
import pytest

from keras_qwen import QwenBackbone, QwenCausalLM, QwenConfig

CONFIG = QwenConfig(
    model_type="qwen3", vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, initializer_range=0.3, max_position_embeddings=16,
    tie_word_embeddings=True,
)  # fmt: skip
IDS = np.random.default_rng(0).integers(0, 61, (2, 9)).astype("int32")


@pytest.fixture(scope="module")
def model():
    return QwenCausalLM(CONFIG, dtype="float32")


def numpy(x):
    return keras.ops.convert_to_numpy(keras.ops.cast(x, "float32"))


def test_inputs_in_every_form(model):
    expected = numpy(model({"token_ids": IDS}))
    assert expected.shape == (2, 9, 61)
    np.testing.assert_array_equal(numpy(model(IDS)), expected)
    np.testing.assert_array_equal(numpy(model({"token_ids": IDS.tolist()})), expected)
    np.testing.assert_allclose(numpy(model({"token_ids": IDS, "padding_mask": np.ones_like(IDS)})), expected, atol=1e-5)
    positions = np.broadcast_to(np.arange(9), IDS.shape)
    np.testing.assert_allclose(numpy(model({"token_ids": IDS, "position_ids": positions})), expected, atol=1e-5)
    for inputs in ({"token_ids": IDS}, {"token_ids": IDS, "padding_mask": np.ones_like(IDS)}):
        np.testing.assert_allclose(model.predict(inputs, verbose=0), expected, atol=1e-5)


def test_backbone_and_model_share_their_variables(model):
    assert isinstance(model.backbone, QwenBackbone)
    assert {id(v) for v in model.backbone.weights} == {id(v) for v in model.weights}
    hidden = numpy(model.backbone(IDS))
    logits = hidden @ numpy(model.backbone.embed_tokens.embeddings).T
    np.testing.assert_allclose(numpy(model(IDS)), logits, atol=1e-5)


def test_no_document_sees_another(model):
    segments = np.array([[1, 1, 1, 1, 2, 2, 2, 0, 0]] * 2)
    before = numpy(model({"token_ids": IDS, "segment_ids": segments}))
    changed = IDS.copy()
    changed[:, 1] = (changed[:, 1] + 1) % 61
    after = numpy(model({"token_ids": changed, "segment_ids": segments}))
    np.testing.assert_array_equal(after[:, 4:], before[:, 4:])
    np.testing.assert_array_equal(after[:, :1], before[:, :1])
    assert (after[:, 1:4] != before[:, 1:4]).any(-1).all()


@pytest.mark.parametrize(
    "inputs, words",
    [
        ({"token_ids": np.full((1, 3), 61)}, "token_ids hold 61; this model's vocabulary has ids 0 to 60"),
        ({"token_ids": np.full((1, 3), -1)}, "token_ids hold -1"),
        ({"token_ids": IDS[0]}, "shape"),
        ({"padding_mask": IDS}, "token_ids"),
        ({"token_ids": IDS, "mask": IDS}, "Unknown inputs \\['mask'\\]"),
        ({"token_ids": IDS, "padding_mask": IDS[:, :3]}, "padding_mask has shape"),
    ],
)
def test_bad_inputs(model, inputs, words):
    with pytest.raises(ValueError, match=words):
        model(inputs)


def test_ids_out_of_the_vocabulary_in_fit():
    model = QwenCausalLM(CONFIG, dtype="float32")
    model.compile("sgd")
    bad = np.full((2, 3), 61)
    for call in (model.fit, model.evaluate):
        with pytest.raises(ValueError, match="token_ids hold 61"):
            call(bad, bad, verbose=0)
    with pytest.raises(ValueError, match="token_ids hold 61"):
        model.predict({"token_ids": bad}, verbose=0)


def test_longer_than_the_model_was_made_for_warns_once():
    model = QwenCausalLM(CONFIG, dtype="float32")
    ids = np.zeros((1, 17), "int32")
    with pytest.warns(UserWarning, match="17 tokens, the model was made for max_position_embeddings=16"):
        model(ids)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model(ids)


@pytest.mark.parametrize("tied", [True, False])
def test_keras_files_weights_and_clones(tmp_path, tied):
    model = QwenCausalLM(CONFIG.replace(tie_word_embeddings=tied), dtype="mixed_bfloat16", remat="mlp")
    expected = numpy(model(IDS))
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert type(loaded) is QwenCausalLM and loaded.config == model.config
    assert loaded.dtype_policy.name == "mixed_bfloat16" and loaded.remat == "mlp"
    np.testing.assert_array_equal(numpy(loaded(IDS)), expected)

    model.save_weights(tmp_path / "model.weights.h5")
    fresh = QwenCausalLM(model.config, dtype="mixed_bfloat16")
    assert not np.array_equal(numpy(fresh(IDS)), expected)
    fresh.load_weights(tmp_path / "model.weights.h5")
    np.testing.assert_array_equal(numpy(fresh(IDS)), expected)

    clone = keras.models.clone_model(model)  # for Keras any functional model: a plain one of the same layers
    clone.set_weights(model.get_weights())
    ones = np.ones_like(IDS)
    inputs = {"token_ids": IDS, "padding_mask": ones, "segment_ids": ones, "position_ids": ones.cumsum(1) - 1}
    np.testing.assert_array_equal(numpy(clone(inputs)), numpy(model(inputs)))
    copy = QwenCausalLM.from_config(model.get_config())
    copy.set_weights(model.get_weights())
    np.testing.assert_array_equal(numpy(copy(IDS)), expected)


def test_layers_have_hugging_faces_names(model, capsys):
    names = [layer.name for layer in model.layers]
    assert [n for n in names if n.startswith("layers_")] == ["layers_0", "layers_1", "layers_2"]
    assert {"embed_tokens", "rotary_emb", "norm"} <= set(names)
    assert model.get_layer("layers_1").self_attn.q_norm.name == "q_norm"
    model.summary()
    shown = capsys.readouterr().out
    assert "layers_2 (DecoderBlock)" in shown.replace("\n", " ") or "layers_2" in shown
    assert f"{model.count_params():,}" in shown


def test_compiled_model_survives_a_keras_file(tmp_path):
    model = QwenCausalLM(CONFIG, dtype="float32")
    model.compile(keras.optimizers.AdamW(1e-3), micro_batch_size=1)
    model.fit(IDS, IDS, batch_size=2, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.micro_batch_size == 1
    again = [m.fit(IDS, IDS, batch_size=2, verbose=0).history["loss"][0] for m in (model, loaded)]
    assert again[0] == pytest.approx(again[1], rel=1e-5)
    for a, b in zip(model.get_weights(), loaded.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("policy", ["block", "attention", "mlp", 2])
def test_remat_changes_no_gradient(policy):
    config = CONFIG.replace(tie_word_embeddings=False)
    plain, recomputing = QwenCausalLM(config, dtype="float32"), QwenCausalLM(config, dtype="float32", remat=policy)
    assert recomputing.remat == policy
    recomputing.set_weights(plain.get_weights())
    for model in (plain, recomputing):
        model.compile(keras.optimizers.SGD(1.0))
        model.fit(IDS, np.roll(IDS, -1, 1), batch_size=2, verbose=0)
    for a, b in zip(plain.get_weights(), recomputing.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_remat_is_changeable_and_checked():
    model = QwenCausalLM(CONFIG, dtype="float32")
    model.remat = 2
    assert [b.remat for b in model.blocks] == ["block", None, "block"]
    model.remat = "attention"
    assert [b.remat for b in model.blocks] == ["attention"] * 3
    for wrong in ("blocks", 0, True, 1.5):
        with pytest.raises(ValueError, match="remat=.*known are"):
            model.remat = wrong
    with pytest.raises(ValueError, match="remat='all'"):
        QwenCausalLM(CONFIG, remat="all")


@pytest.mark.parametrize(("length", "asked", "chosen"), [(16, "auto", "dense"), (4096, "auto", "blockwise")])
def test_attention_summary_says_what_is_used(length, asked, chosen):
    config = QwenConfig(
        model_type="qwen2", vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=1, use_sliding_window=True, sliding_window=8, max_window_layers=1,
    )  # fmt: skip
    if keras.backend.backend() == "torch":
        chosen = "flash"
    where = f"(asked for: {asked}) for {length} tokens of float32 on {keras.backend.backend()}, cpu"
    assert QwenCausalLM(config, dtype="float32", attention=asked).attention_summary(length).splitlines() == [
        f"1 layer, full attention: {chosen} {where}",
        f"2 layers, a window of 8 tokens: {chosen} {where}",
    ]
