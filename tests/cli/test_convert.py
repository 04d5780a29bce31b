"""`keras-qwen convert`: dtype, file sizes, merging, and what it refuses."""

import shutil

import keras
import numpy as np
import pytest

import keras_qwen as kq
from keras_qwen.checkpoint.safetensors_files import read_folder


def words(text):
    return " ".join(text.split())


def values(folder):
    arrays = {}
    for name, tensor in read_folder(folder).items():
        arrays[name] = np.empty(tensor.shape, tensor.dtype)
        tensor.read_into(arrays[name])
    return arrays


def test_dtype_and_file_size(shell, tiny_folder, tmp_path):
    output = tmp_path / "new"
    result = shell("convert", tiny_folder, output, "--dtype", "bfloat16", "--max-shard-size", "20KB")
    assert result.exit_code == 0, result.stderr
    before, after = values(tiny_folder), values(output)
    assert {str(array.dtype) for array in after.values()} == {"bfloat16"} and after.keys() == before.keys()
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array.astype(after[name].dtype))
    files = sorted(output.glob("model-*.safetensors"))
    assert len(files) > 1 and f"bfloat16, {len(files)} files" in words(result.stdout)
    assert result.stdout.strip().endswith("ok: 24 tensors, all there and of the right shape")
    assert (output / "tokenizer.json").read_bytes() == (tiny_folder / "tokenizer.json").read_bytes()
    back = tmp_path / "back"
    assert shell("convert", output, back, "--dtype", "float32").exit_code == 0
    for name, array in values(back).items():
        np.testing.assert_array_equal(array, after[name].astype("float32"))


def test_without_options_values_stay_bit_for_bit(shell, reference_folder, tmp_path):
    assert shell("convert", reference_folder("qwen2"), tmp_path / "new").exit_code == 0
    after = values(tmp_path / "new")
    for name, array in values(reference_folder("qwen2")).items():
        np.testing.assert_array_equal(after[name].view("uint8"), array.view("uint8"))


@pytest.mark.parametrize("named_by_the_adapter", [False, True])
def test_a_merged_adapter_computes_the_reference_logits(
    named_by_the_adapter, shell, reference_folder, tmp_path, monkeypatch
):
    adapter, base = reference_folder("adapters/lora_qwen2_tied"), reference_folder("qwen2_tied")
    if named_by_the_adapter:  # it names its base by a relative path
        monkeypatch.chdir(base.parent)
        result = shell("convert", adapter, tmp_path / "merged")
    else:
        result = shell("convert", base, tmp_path / "merged", "--adapter", adapter)
    assert result.exit_code == 0, result.stderr
    expected = np.load(adapter / "expected.npz")
    logits = kq.QwenCausalLM.from_pretrained(tmp_path / "merged")(expected["input_ids"])
    np.testing.assert_allclose(keras.ops.convert_to_numpy(logits), expected["logits"], atol=3e-5)


def test_a_folder_without_a_checkpoint_is_never_replaced(shell, tiny_folder, tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "me.jpg").write_text("picture")
    for options in ([], ["--overwrite"]):
        result = shell("convert", tiny_folder, tmp_path / "photos", *options)
        assert result.exit_code == 1
        assert "holds files, but no checkpoint" in words(result.stderr)
    assert [path.name for path in (tmp_path / "photos").iterdir()] == ["me.jpg"]


def test_a_checkpoint_is_replaced_if_asked_for(shell, tiny_folder, reference_folder, tmp_path):
    shutil.copytree(reference_folder("qwen2"), tmp_path / "old")
    result = shell("convert", tiny_folder, tmp_path / "old")
    assert (result.exit_code, "pass --overwrite" in words(result.stderr)) == (1, True)
    assert kq.QwenConfig.from_pretrained(tmp_path / "old").model_type == "qwen2"
    assert shell("convert", tiny_folder, tmp_path / "old", "--overwrite").exit_code == 0
    assert kq.QwenConfig.from_pretrained(tmp_path / "old").model_type == "qwen3"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["{tiny}", "{tiny}", "--overwrite"], "is the source itself"),
        (["{tiny}", "{tmp}/new", "--dtype", "int8"], "known are float32, float16, bfloat16"),
        (["{tiny}", "{tmp}/new", "--max-shard-size", "5 bananas"], "'5 bananas' is not understood"),
        (["{tiny}", "{tmp}/file"], "is a file"),
        (["{tmp}/nowhere", "{tmp}/new"], "There is no folder"),
        (["{tiny}", "{tmp}/new", "--adapter", "{tiny}"], "adapter_config.json"),
    ],
)
def test_refused(arguments, text, shell, tiny_folder, tmp_path):
    (tmp_path / "file").write_text("")
    result = shell("convert", *(argument.format(tiny=tiny_folder, tmp=tmp_path) for argument in arguments))
    assert result.exit_code == 1
    assert text in words(result.stderr)
    assert not (tmp_path / "new").exists()


def test_a_damaged_source_is_diagnosed_before_anything_is_loaded(shell, tiny_folder, tmp_path):
    shutil.copytree(tiny_folder, tmp_path / "damaged")
    path = tmp_path / "damaged" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    result = shell("convert", tmp_path / "damaged", tmp_path / "new")
    assert (result.exit_code, "not sound: truncated" in result.stdout) == (1, True)
    assert not (tmp_path / "new").exists()
