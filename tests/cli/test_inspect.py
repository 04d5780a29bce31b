"""`keras-qwen inspect`: good checkpoints, and everything that can be wrong with one."""

import json
import math
import time

import ml_dtypes
import numpy as np
import pytest

from keras_qwen.checkpoint.safetensors_files import read_folder, read_header, write_file
from keras_qwen.cli.diagnosis import diagnose
from keras_qwen.config import QwenConfig
from keras_qwen.parameters import parameter_table

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def words(text):
    return " ".join(text.split())


def rewrite(folder, change, file=WEIGHTS):
    """Writes a weights file anew with what `change` makes of its {name: array}."""
    tensors = {}
    for name, tensor in read_header(folder / file).items():
        tensors[name] = np.empty(tensor.shape, tensor.dtype)
        tensor.read_into(tensors[name])
    change(tensors)
    (folder / file).unlink()
    write_file(folder / file, [(n, a.dtype, a.shape, lambda a=a: a) for n, a in tensors.items()])


def in_two_files(folder):
    """Splits a checkpoint; returns the index, {name: file}."""
    tensors = read_folder(folder)
    names, weight_map = list(tensors), {}
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        arrays = {name: np.empty(tensors[name].shape, tensors[name].dtype) for name in part}
        for name, array in arrays.items():
            tensors[name].read_into(array)
            weight_map[name] = file
        write_file(folder / file, [(n, a.dtype, a.shape, lambda a=a: a) for n, a in arrays.items()])
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def kinds(folder, **options):
    return [(problem.kind, problem.subject) for problem in diagnose(folder, **options).problems]


def test_a_good_model(shell, tiny_folder):
    result = shell("inspect", tiny_folder)
    assert result.exit_code == 0
    text = words(result.stdout)
    size = sum(math.prod(t.shape) for t in read_folder(tiny_folder).values())
    assert f"{size / 1000:.1f} k parameters, {size * 4 / 1000:.1f} kB, float32, in model.safetensors" in text
    assert "qwen3, 2 layers, hidden_size 32" in text and "4 heads, 2 for keys and values, head_dim 8" in text
    assert "tokenizer.json, tokenizer_config.json, with a chat template" in text
    assert "model.layers.* input_layernorm.weight 2 32 float32 256 bytes" in text
    assert "self_attn.q_proj.weight 2 32 x 32 float32 8.2 kB" in text
    assert text.endswith("ok: 24 tensors, all there and of the right shape; values not read (--check-finite does)")


def test_all_lists_every_tensor(shell, tiny_folder):
    text = words(shell("inspect", tiny_folder, "--all").stdout)
    for name in read_folder(tiny_folder):
        assert f"{name} 1 " in text


@pytest.mark.parametrize("name", ["qwen2", "qwen2_sliding", "qwen2_yarn", "qwen3", "qwen3_tied"])
def test_golden_checkpoints_are_sound(name, shell, reference_folder):
    result = shell("inspect", reference_folder(name), "--check-finite")
    assert (result.exit_code, result.stdout.strip().endswith("right shape; finite")) == (0, True)


def test_missing_unknown_and_misshapen_are_all_reported(copied, shell):
    folder = copied("qwen2")

    def change(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.visual.weight"] = np.zeros((2, 3), "float32")
        tensors["model.norm.weight"] = np.zeros(5, "float32")

    rewrite(folder, change)
    assert kinds(folder) == [
        ("missing", "model.layers.1.mlp.up_proj.weight"),
        ("unknown", "model.visual.weight"),
        ("misshapen", "model.norm.weight"),
    ]
    result = shell("inspect", folder)
    assert result.exit_code == 1
    text = words(result.stdout)
    assert "model.layers.1.mlp.up_proj.weight: is in none of model.safetensors; config.json asks for it" in text
    assert "model.visual.weight: (2, 3) in model.safetensors, which config.json does not account for" in text
    assert "model.norm.weight: (5,) in model.safetensors; config.json asks for (48,)" in text
    assert text.endswith("not sound: missing, unknown, misshapen")


def test_a_truncated_file_is_named_and_its_tensors_are_not_called_missing(copied, shell):
    folder = copied("qwen2")
    in_two_files(folder)
    path = folder / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    assert kinds(folder) == [("truncated", path.name)]
    result = shell("inspect", folder)
    assert result.exit_code == 1
    assert (
        f"{path.name}:" in result.stdout and "truncated" in result.stdout and "Fetch the file again." in result.stdout
    )
    assert "model-00001-of-00002.safetensors" not in result.stdout


def test_a_truncated_single_file(copied):
    folder = copied("qwen2")
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:40])
    assert kinds(folder) == [("truncated", WEIGHTS)]


def test_files_and_index_must_agree(copied):
    folder = copied("qwen2")
    weight_map = in_two_files(folder)
    first, second = list(weight_map)[0], list(weight_map)[-1]
    weight_map |= {first: weight_map[second], "model.nowhere": weight_map[second]}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert kinds(folder) == [("index", first), ("missing", "model.nowhere")]
    (folder / weight_map[second]).unlink()
    assert kinds(folder) == [("missing", weight_map[second]), ("index", first)]


def test_an_index_that_is_none(copied):
    folder = copied("qwen2")
    (folder / INDEX).write_text('{"weight_map": {"model.norm.weight": "../evil.safetensors"}}')
    assert kinds(folder) == [("index", INDEX)]


def test_no_weights_names_what_is_there(copied, shell):
    folder = copied("qwen2")
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    result = shell("inspect", folder)
    assert result.exit_code == 1
    assert "Convert pytorch_model.bin to safetensors." in result.stdout


def test_check_finite_names_the_tensor(copied, shell):
    folder = copied("qwen2")

    def change(tensors):
        tensors["model.norm.weight"][3] = np.nan

    rewrite(folder, change)
    assert shell("inspect", folder).exit_code == 0
    result = shell("inspect", folder, "--check-finite")
    assert result.exit_code == 1
    assert "model.norm.weight: holds NaN or infinity in model.safetensors" in words(result.stdout)


def test_a_head_beside_tied_embeddings_has_to_equal_them(copied, shell):
    folder = copied("qwen2_tied")

    def change(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

    rewrite(folder, change)
    assert shell("inspect", folder, "--check-finite").exit_code == 0

    def change_again(tensors):
        tensors["lm_head.weight"][0, 0] += 1

    rewrite(folder, change_again)
    result = shell("inspect", folder, "--check-finite")
    assert result.exit_code == 1
    assert "Set tie_word_embeddings to false in config.json." in words(result.stdout)


def test_integers_are_not_loadable(copied):
    folder = copied("qwen2")

    def change(tensors):
        tensors["model.norm.weight"] = tensors["model.norm.weight"].astype("float32").view("int32")

    # written as a training state may be: the reader of checkpoints refuses such a file as a whole
    rewrite(folder, change)
    assert kinds(folder) == [("not loadable", "model.norm.weight")]


def test_an_unknown_dtype_is_not_loadable(copied):
    folder = copied("qwen2")
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content.replace(b'"F32"', b'"F8X"'))
    assert kinds(folder) == [("not loadable", WEIGHTS)]


def test_a_config_that_is_not_supported(shell, reference_folder):
    result = shell("inspect", reference_folder("qwen3_moe"))
    assert result.exit_code == 1
    assert "mixture of experts" in result.stdout and "model.layers.*" in result.stdout


def test_no_config(copied, shell):
    folder = copied("qwen2")
    (folder / "config.json").unlink()
    result = shell("inspect", folder)
    assert (result.exit_code, "has no config.json" in words(result.stdout)) == (1, True)


def test_a_folder_that_is_not_there(shell, tmp_path):
    result = shell("inspect", tmp_path / "nowhere")
    assert result.exit_code == 1
    assert f"Error: There is no folder {tmp_path / 'nowhere'}" in words(result.stderr)


def test_an_adapter(shell, reference_folder):
    adapter = reference_folder("adapters/lora_qwen2_tied")
    result = shell("inspect", adapter)
    assert result.exit_code == 0
    text = words(result.stdout)
    assert "LoRA, rank 4, alpha 8, dropout 0" in text and "--base FOLDER" in text
    assert "self_attn.q_proj.lora_A.weight 3 4 x 48 float32" in text
    result = shell("inspect", adapter, "--base", reference_folder("qwen2_tied"))
    assert (result.exit_code, "--base" in result.stdout) == (0, False)


@pytest.mark.parametrize(("name", "base"), [("dora_qwen3_tied", "qwen3_tied"), ("rslora_qwen3", "qwen3")])
def test_other_adapters_fit_their_base(name, base, reference_folder):
    assert kinds(reference_folder(f"adapters/{name}"), base=reference_folder(base)) == []


def test_an_adapter_for_another_base(reference_folder):
    found = kinds(reference_folder("adapters/lora_qwen2_tied"), base=reference_folder("qwen3_tied"))
    assert {kind for kind, _ in found} == {"misshapen"}


def test_an_adapter_without_a_partner_or_with_two_ranks(copied):
    folder = copied("adapters/lora_qwen2_tied")
    module = "base_model.model.model.layers.{}.self_attn.q_proj"

    def change(tensors):
        del tensors[module.format(0) + ".lora_B.weight"]
        tensors[module.format(1) + ".lora_A.weight"] = np.zeros((2, 48), "float32")

    rewrite(folder, change, "adapter_model.safetensors")
    assert kinds(folder) == [
        ("missing", module.format(0) + ".lora_B.weight"),
        ("misshapen", module.format(1)),
    ]


def test_a_model_of_32_billion_parameters_is_read_in_a_moment(tmp_path, shell):
    """Files with holes: their headers are whole, their 65 GB of values take no room."""
    config = QwenConfig(
        model_type="qwen2",
        vocab_size=152064,
        hidden_size=5120,
        intermediate_size=27648,
        num_hidden_layers=64,
        num_attention_heads=40,
        num_key_value_heads=8,
    )
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    rows, weight_map = parameter_table(config), {}
    for number in range(17):
        file, header, offset = f"model-{number + 1:05d}-of-00017.safetensors", {}, 0
        for row in rows[number::17]:
            end = offset + row.size * np.dtype(ml_dtypes.bfloat16).itemsize
            header[row.hf_name] = {"dtype": "BF16", "shape": row.hf_shape, "data_offsets": [offset, end]}
            offset, weight_map[row.hf_name] = end, file
        text = json.dumps(header).encode()
        with open(tmp_path / file, "wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(8 + len(text) + offset)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    start = time.monotonic()
    result = shell("inspect", tmp_path)
    seconds = time.monotonic() - start
    assert result.exit_code == 0
    assert "32.8 B parameters, 65.5 GB, bfloat16, in 17 files" in result.stdout
    assert seconds < 5  # 0.1 s here; reading 65 GB takes minutes
