"""Adapter files: what is written, and what does not fit is named."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from keras_qwen import QwenCausalLM

ADAPTERS = ("lora_qwen2_tied", "rslora_qwen3", "dora_qwen3_tied")
BASES = {"lora_qwen2_tied": "qwen2_tied", "rslora_qwen3": "qwen3", "dora_qwen3_tied": "qwen3_tied"}


@pytest.fixture(scope="module")
def bases(reference_folder):
    return {name: QwenCausalLM.from_pretrained(reference_folder(name), dtype="float32") for name in BASES.values()}


@pytest.fixture
def base(bases):
    """A function from an adapter's name to its base, without adapters again after the test."""
    yield lambda adapter: bases[BASES[adapter]]
    for model in bases.values():
        for name in model.adapters:
            model.delete_adapter(name)


@pytest.fixture
def changed(tmp_path, reference_folder):
    """A function that copies a reference adapter and changes its tensors or its settings."""

    def change(name, tensors=None, **settings):
        folder = tmp_path / "changed"
        shutil.copytree(reference_folder("adapters") / name, folder)
        file = folder / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
        if tensors is not None:
            file = folder / "adapter_model.safetensors"
            save_file(tensors(load_file(file)), file)
        return folder

    return change


@pytest.mark.parametrize("name", ADAPTERS)
def test_round_trip_is_byte_for_byte(name, base, reference_folder, tmp_path):
    folder = reference_folder("adapters") / name
    model = base(name)
    model.load_adapter(folder)
    model.save_adapter(tmp_path / "again")
    before, after = (load_file(f / "adapter_model.safetensors") for f in (folder, tmp_path / "again"))
    assert before.keys() == after.keys()
    for tensor, value in before.items():
        assert value.dtype == after[tensor].dtype and value.tobytes() == after[tensor].tobytes()
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert json.loads((tmp_path / "again" / "adapter_config.json").read_text()) == settings
    assert {p.name for p in (tmp_path / "again").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}


def test_other_files_in_the_folder_stay(base, reference_folder, tmp_path):
    (tmp_path / "README.md").write_text("kept")
    (tmp_path / "adapter_model.safetensors").write_text("old")
    model = base("rslora_qwen3")
    model.load_adapter(reference_folder("adapters") / "rslora_qwen3")
    model.save_adapter(tmp_path)
    assert (tmp_path / "README.md").read_text() == "kept"
    assert len(load_file(tmp_path / "adapter_model.safetensors")) == 42


def test_half_precision_files_load(base, changed):
    folder = changed("lora_qwen2_tied", lambda tensors: {n: t.astype("float16") for n, t in tensors.items()})
    model = base("lora_qwen2_tied")
    model.load_adapter(folder)
    assert {v.dtype for v in model.trainable_variables} == {"float32"}


def without_first(tensors):
    return dict(sorted(tensors.items())[1:])


@pytest.mark.parametrize(
    "adapter, onto, tensors, settings, words",
    [
        ("lora_qwen2_tied", None, without_first, {}, "lacks 1 of the .* tensors .*layers.0.self_attn.q_proj.lora_A"),
        ("lora_qwen2_tied", None, None, {"target_modules": ["q_proj"]}, "does not account for on this model: .*v_proj"),
        ("lora_qwen2_tied", None, None, {"r": 8}, r"lora_A.weight in .* has shape \(4, 48\).*\(8, 48\)"),
        ("rslora_qwen3", "dora_qwen3_tied", None, {}, "has shape .* another size|Is it for another base model"),
        ("dora_qwen3_tied", None, None, {"use_dora": False}, "lora_magnitude_vector"),
        ("rslora_qwen3", None, None, {"lora_bias": True}, "lora_bias=True"),
        ("rslora_qwen3", None, None, {"target_modules": ["c_attn"]}, "match no projection"),
    ],
)
def test_what_does_not_fit_is_named_and_changes_nothing(base, changed, adapter, onto, tensors, settings, words):
    model = base(onto or adapter)
    weights, trainable = len(model.weights), len(model.trainable_variables)
    with pytest.raises(ValueError, match=words):
        model.load_adapter(changed(adapter, tensors, **settings))
    assert model.adapters == [] and len(model.weights) == weights
    assert len(model.trainable_variables) == trainable


def test_missing_weights(base, changed):
    folder = changed("rslora_qwen3")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(OSError, match="has no adapter_model.safetensors.*adapter_model.bin"):
        base("rslora_qwen3").load_adapter(folder)


def test_truncated_weights(base, changed):
    file = changed("rslora_qwen3") / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(OSError, match="truncated"):
        base("rslora_qwen3").load_adapter(file.parent)


def test_a_failed_save_leaves_the_old_adapter(base, reference_folder, tmp_path, monkeypatch):
    model = base("rslora_qwen3")
    model.load_adapter(reference_folder("adapters") / "rslora_qwen3")
    model.save_adapter(tmp_path / "adapter")
    before = (tmp_path / "adapter" / "adapter_model.safetensors").read_bytes()
    model.trainable_variables[0].assign(np.zeros(model.trainable_variables[0].shape))

    def full_disk(*_, **__):
        raise OSError("No space left on device")

    monkeypatch.setattr("keras_qwen.checkpoint.adapters.write_file", full_disk)
    with pytest.raises(OSError, match="No space"):
        model.save_adapter(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").read_bytes() == before
