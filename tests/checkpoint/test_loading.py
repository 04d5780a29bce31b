"""Loading: golden checkpoints come in exactly; what does not fit is named and refused."""

import json
import shutil
import warnings

import keras
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from keras_qwen import QwenBackbone, QwenCausalLM
from keras_qwen.backend import concrete_value
from keras_qwen.checkpoint import loading
from keras_qwen.parameters import match_variables


def read_tensors(folder):
    return safetensors.numpy.load_file(folder / "model.safetensors")


@pytest.fixture
def checkpoint(tmp_path, reference_folder):
    """A function that copies a reference checkpoint, changes its tensors and config, and returns the folder."""

    def make(name="qwen2", change=None, **settings):
        folder = tmp_path / name
        shutil.copytree(reference_folder(name), folder)
        if change is not None:
            tensors = read_tensors(folder)
            change(tensors)
            safetensors.numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text()) | settings
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make


@pytest.mark.parametrize("name", ["qwen2", "qwen3_tied"])
@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_variables_hold_the_tensors(reference_folder, name, dtype):
    folder = reference_folder(name)
    model = QwenCausalLM.from_pretrained(folder, dtype=dtype)
    stored = read_tensors(folder)
    table = model.parameter_table(model.config)
    matched = match_variables(table, model.variables)
    for row in table:
        expected = row.transform.forward(stored[row.hf_name])
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(matched[row.path]), expected, row.path)
    assert model.dtype_policy.name == dtype and matched["norm/scale"].dtype == "float32"


def test_rounding_into_bfloat16_variables_warns(reference_folder):
    with pytest.warns(UserWarning, match="in float32, which bfloat16 variables cannot hold exactly"):
        model = QwenCausalLM.from_pretrained(reference_folder("qwen2_tied"), dtype="bfloat16")
    stored = read_tensors(reference_folder("qwen2_tied"))["model.norm.weight"]
    found = keras.ops.convert_to_numpy(keras.ops.cast(model.backbone.norm.scale, "float32"))
    np.testing.assert_array_equal(found, stored.astype(ml_dtypes.bfloat16).astype("float32"))


@pytest.mark.parametrize("stored", ["float16", "bfloat16", "mixed"])
def test_half_precision_files(checkpoint, stored):
    kinds = {"float16": [np.float16], "bfloat16": [ml_dtypes.bfloat16], "mixed": [ml_dtypes.bfloat16, np.float32]}[
        stored
    ]

    def change(tensors):
        for i, name in enumerate(tensors):
            tensors[name] = tensors[name].astype(kinds[i % len(kinds)])

    folder = checkpoint("qwen2_tied", change)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model = QwenCausalLM.from_pretrained(folder, dtype="float32")
    expected = read_tensors(folder)["model.embed_tokens.weight"].astype("float32")
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(model.backbone.embed_tokens.embeddings), expected)


def test_no_random_initialisation_happens(reference_folder, monkeypatch):
    drawn = []
    original = keras.initializers.RandomNormal.__call__

    def spy(self, shape, dtype=None, **kwargs):
        value = original(self, shape, dtype=dtype, **kwargs)
        drawn.append(concrete_value(value))  # Keras makes placeholders so while it infers shapes, never values
        return value

    monkeypatch.setattr(keras.initializers.RandomNormal, "__call__", spy)
    QwenCausalLM.from_pretrained(reference_folder("qwen2_tied"), dtype="float32")
    assert all(value is None for value in drawn)


def test_backbone_loads_and_passes_over_the_head(reference_folder):
    folder = reference_folder("qwen2")
    backbone = QwenBackbone.from_pretrained(folder, dtype="float32")
    whole = QwenCausalLM.from_pretrained(folder, dtype="float32")
    ids = np.load(folder / "expected.npz")["input_ids"]
    np.testing.assert_array_equal(
        keras.ops.convert_to_numpy(backbone(ids)), keras.ops.convert_to_numpy(whole.backbone(ids))
    )


def test_config_overrides(reference_folder):
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    model = QwenCausalLM.from_pretrained(
        reference_folder("qwen2_tied"), dtype="float32", config={"rope_scaling": scaling}
    )
    assert model.config.rope_parameters == scaling | {"rope_theta": 10000.0}
    assert model.backbone.rotary_emb.attention_factor == pytest.approx(0.1 * np.log(2) + 1)


def remove(name):
    return lambda tensors: tensors.pop(name)


def put(name, make):
    return lambda tensors: tensors.update({name: make(tensors)})


Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    "name, change, settings, words",
    [
        ("qwen2", remove(Q), {}, rf"lacks 1 of the 39 tensors.*{Q}"),
        ("qwen2", remove("lm_head.weight"), {}, r"lacks 1 of .*lm_head\.weight"),
        ("qwen2", put("model.extra", lambda t: t[Q]), {}, r"does not account for: model\.extra in model\.safetensors"),
        (
            "qwen2",
            put(Q, lambda t: t[Q].reshape(24, 96).copy()),
            {},
            rf"Tensor {Q} in .*has shape \(24, 96\).*\(48, 48\)",
        ),
        ("qwen2", None, {"num_hidden_layers": 2}, r"does not account for: model\.layers\.2\."),
        ("qwen2", None, {"num_hidden_layers": 4}, r"lacks 12 of the .*model\.layers\.3\."),
        ("qwen2", None, {"num_attention_heads": 3, "head_dim": 8}, "no multiple of num_key_value_heads"),
        ("qwen2", None, {"num_attention_heads": 4, "head_dim": 8}, r"q_proj\.weight in .*shape \(48, 48\).*\(32, 48\)"),
        ("qwen3", None, {"num_key_value_heads": 1}, r"k_proj\.weight in .*shape \(32, 40\).*\(16, 40\)"),
        (
            "qwen2",
            None,
            {"tie_word_embeddings": True},
            r"lm_head\.weight that differs from model\.embed_tokens\.weight",
        ),
    ],
)
def test_what_does_not_fit_is_refused(checkpoint, name, change, settings, words):
    layer_types = {"layer_types": None} if "num_hidden_layers" in settings else {}
    folder = checkpoint(name, change, **settings, **layer_types)
    with pytest.raises(ValueError, match=words):
        QwenCausalLM.from_pretrained(folder, dtype="float32")


def test_a_tied_checkpoint_may_repeat_its_head(checkpoint):
    folder = checkpoint("qwen2_tied", put("lm_head.weight", lambda t: t["model.embed_tokens.weight"].copy()))
    QwenCausalLM.from_pretrained(folder, dtype="float32")


def test_old_rotary_buffers_are_passed_over(checkpoint):
    buffer = put("model.layers.0.self_attn.rotary_emb.inv_freq", lambda t: np.ones(4, "float32"))
    QwenCausalLM.from_pretrained(checkpoint("qwen2_tied", buffer), dtype="float32")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_not_finite_tensors_raise_on_request(checkpoint, value):
    def change(tensors):
        tensors[Q][3, 5] = value

    folder = checkpoint("qwen2", change)
    QwenCausalLM.from_pretrained(folder, dtype="float32")
    with pytest.raises(ValueError, match=rf"Tensor {Q} in .*model\.safetensors holds NaN or infinity"):
        QwenCausalLM.from_pretrained(folder, dtype="float32", check_finite=True)


def test_a_missing_folder(tmp_path):
    with pytest.raises(OSError, match="nowhere"):
        QwenCausalLM.from_pretrained(tmp_path / "nowhere")


def test_progress_bar_appears_only_when_loading_takes_long(reference_folder, monkeypatch, capsys):
    QwenCausalLM.from_pretrained(reference_folder("qwen2_tied"), dtype="float32")
    assert "Loading" not in capsys.readouterr().out
    monkeypatch.setattr(loading, "_SILENT_SECONDS", 0.0)
    QwenCausalLM.from_pretrained(reference_folder("qwen2_tied"), dtype="float32")
    assert "Loading qwen2_tied" in capsys.readouterr().out


def test_a_config_of_another_kind_is_refused(checkpoint):
    with pytest.raises(ValueError, match=r"config\.json: .*mixture of experts"):
        QwenCausalLM.from_pretrained(checkpoint("qwen2_moe"))
