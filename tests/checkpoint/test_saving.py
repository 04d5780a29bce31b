"""Saving: byte-identical tensors, Hugging Face's layout, all or nothing."""

import json
import shutil
import signal
import subprocess
import sys
import textwrap

import keras
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from keras_qwen import QwenBackbone, QwenCausalLM, QwenConfig
from keras_qwen.checkpoint.saving import parse_size

DENSE = ["qwen2", "qwen2_tied", "qwen2_sliding", "qwen2_yarn", "qwen2_linear", "qwen3", "qwen3_tied"]


def raw_tensors(folder):
    found = {}
    for file in folder.glob("*.safetensors"):
        for name, array in safetensors.numpy.load_file(file).items():
            assert name not in found
            found[name] = (str(array.dtype), array.shape, array.tobytes())
    return found


@pytest.mark.parametrize("name", DENSE)
def test_untouched_tensors_are_byte_identical(reference_folder, tmp_path, name):
    folder = reference_folder(name)
    QwenCausalLM.from_pretrained(folder, dtype="float32").save_pretrained(tmp_path / "out")
    assert raw_tensors(tmp_path / "out") == raw_tensors(folder)
    source = json.loads((folder / "config.json").read_text())
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {k: written[k] for k in ("architectures", "vocab_size", "rms_norm_eps", "tie_word_embeddings")} == {
        k: source[k] for k in ("architectures", "vocab_size", "rms_norm_eps", "tie_word_embeddings")
    }


@pytest.fixture
def mixed_source(reference_folder, tmp_path):
    """A checkpoint whose tensors are bfloat16 and float32 by turns, with companion files."""
    folder = tmp_path / "source"
    shutil.copytree(reference_folder("qwen2_tied"), folder)
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    for name in list(tensors)[::2]:
        tensors[name] = tensors[name].astype(ml_dtypes.bfloat16)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    (folder / "generation_config.json").write_bytes(b'{"top_k":   20}\r\n')
    (folder / "tokenizer_config.json").write_bytes('{ "odd": "\u00e9" }'.encode())
    (folder / "chat_template.jinja").write_bytes(b"{{ messages }}\n")
    (folder / "pytorch_model.bin").write_bytes(b"not carried over")
    return folder


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_mixed_dtypes_and_companion_files_survive(mixed_source, tmp_path, dtype):
    QwenCausalLM.from_pretrained(mixed_source, dtype=dtype).save_pretrained(tmp_path / "out")
    assert raw_tensors(tmp_path / "out") == raw_tensors(mixed_source)
    for name in ("generation_config.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (mixed_source / name).read_bytes()
    assert not (tmp_path / "out" / "pytorch_model.bin").exists()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype_of_the_written_tensors(reference_folder, tmp_path, dtype):
    folder = reference_folder("qwen3_tied")
    QwenCausalLM.from_pretrained(folder, dtype="float32").save_pretrained(tmp_path / "out", dtype=dtype)
    target = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    for name, array in safetensors.numpy.load_file(folder / "model.safetensors").items():
        assert raw_tensors(tmp_path / "out")[name] == (dtype, array.shape, array.astype(target).tobytes())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == dtype


def test_a_new_model_is_written_in_its_variables_dtype(tmp_path, reference_folder):
    config = QwenConfig.from_pretrained(reference_folder("qwen2_tied"))
    for policy, stored in [("float32", "float32"), ("mixed_bfloat16", "float32"), ("bfloat16", "bfloat16")]:
        QwenCausalLM(config, dtype=policy).save_pretrained(tmp_path / policy)
        assert {dtype for dtype, _, _ in raw_tensors(tmp_path / policy).values()} == {stored}
        assert json.loads((tmp_path / policy / "config.json").read_text())["dtype"] == stored


@pytest.mark.parametrize("limit, files", [("5GB", 1), (20_000, None), ("0.02MB", None), (1, 39)])
def test_shards(reference_folder, tmp_path, limit, files):
    folder, out = reference_folder("qwen2"), tmp_path / "out"
    QwenCausalLM.from_pretrained(folder, dtype="float32").save_pretrained(out, max_shard_size=limit)
    assert raw_tensors(out) == raw_tensors(folder)
    found = sorted(p.name for p in out.glob("*.safetensors"))
    if files == 1:
        assert found == ["model.safetensors"] and not (out / "model.safetensors.index.json").exists()
        return
    n = len(found)
    assert n == (files or n) and found == [f"model-{i:05d}-of-{n:05d}.safetensors" for i in range(1, n + 1)]
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in raw_tensors(out).values())
    for file in found:
        with safetensors.safe_open(out / file, "numpy") as opened:
            names = set(opened.keys())
            assert names == {n for n, f in index["weight_map"].items() if f == file}
            sizes = [len(raw_tensors(out)[n][2]) for n in names]
            assert sum(sizes) <= 20_000 or len(sizes) == 1
    QwenCausalLM.from_pretrained(out, dtype="float32")


def test_saving_over_an_older_checkpoint_leaves_nothing_of_it(reference_folder, tmp_path):
    model, out = QwenCausalLM.from_pretrained(reference_folder("qwen2"), dtype="float32"), tmp_path / "out"
    model.save_pretrained(out, max_shard_size=20_000)
    (out / "README.md").write_text("mine")
    model.save_pretrained(out)
    assert sorted(p.name for p in out.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert raw_tensors(out) == raw_tensors(reference_folder("qwen2"))


def test_saving_over_its_own_source(mixed_source):
    before = raw_tensors(mixed_source)
    model = QwenCausalLM.from_pretrained(mixed_source, dtype="float32")
    model.save_pretrained(mixed_source)
    assert raw_tensors(mixed_source) == before
    assert (mixed_source / "chat_template.jinja").read_bytes() == b"{{ messages }}\n"


def test_a_source_that_is_gone_warns(mixed_source, tmp_path):
    model = QwenCausalLM.from_pretrained(mixed_source, dtype="float32")
    expected = raw_tensors(mixed_source)
    shutil.rmtree(mixed_source)
    with pytest.warns(UserWarning, match="is gone: tokenizer and generation settings"):
        model.save_pretrained(tmp_path / "out")
    assert raw_tensors(tmp_path / "out") == expected


def test_trained_values_are_what_is_written(reference_folder, tmp_path):
    model = QwenCausalLM.from_pretrained(reference_folder("qwen2_tied"), dtype="float32")
    kernel = model.get_layer("layers_1").mlp.up_proj.kernel
    kernel.assign(kernel + 1.0)
    model.save_pretrained(tmp_path / "out")
    source = safetensors.numpy.load_file(reference_folder("qwen2_tied") / "model.safetensors")
    found = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    changed = "model.layers.1.mlp.up_proj.weight"
    np.testing.assert_array_equal(found[changed], source[changed] + np.float32(1))
    assert all(np.array_equal(found[n], source[n]) for n in source.keys() - {changed})


def test_backbone(reference_folder, tmp_path):
    QwenBackbone.from_pretrained(reference_folder("qwen2"), dtype="float32").save_pretrained(tmp_path / "out")
    expected = raw_tensors(reference_folder("qwen2"))
    del expected["lm_head.weight"]
    assert raw_tensors(tmp_path / "out") == expected


@pytest.mark.parametrize("arguments, words", [({"dtype": "int8"}, "int8"), ({"max_shard_size": "5 XB"}, "5 XB")])
def test_bad_arguments_touch_nothing(reference_folder, tmp_path, arguments, words):
    model = QwenCausalLM.from_pretrained(reference_folder("qwen2_tied"), dtype="float32")
    with pytest.raises(ValueError, match=words):
        model.save_pretrained(tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "size, expected",
    [("5GB", 5 * 10**9), ("1.5 KB", 1500), ("2GiB", 2**31), ("7b", 7), (9, 9), (" 80 MiB ", 80 * 2**20)],
)
def test_sizes(size, expected):
    assert parse_size(size) == expected


@pytest.mark.parametrize("size", ["", "5", "GB", "-1GB", "5 XB", 0, -3, 1.5, None, True])
def test_sizes_that_are_none(size):
    with pytest.raises(ValueError, match="size"):
        parse_size(size)


SAVE_AND_DIE = """
    import os, signal
    from keras_qwen import QwenCausalLM
    from keras_qwen.checkpoint import saving

    model = QwenCausalLM.from_pretrained({source!r}, dtype="float32")
    kernel = model.get_layer("layers_0").mlp.up_proj.kernel
    kernel.assign(kernel + 1.0)
    original = saving.write_file

    def dying(path, tensors):
        original(path, tensors[: len(tensors) // 2])
        {act}

    saving.write_file = dying
    model.save_pretrained({target!r})
"""
KILL, FULL = "os.kill(os.getpid(), signal.SIGKILL)", "raise OSError(28, 'No space left on device')"


@pytest.mark.parametrize("act, code", [(KILL, -signal.SIGKILL), (FULL, 1)])
def test_kill_and_full_disk_leave_the_old_checkpoint(reference_folder, tmp_path, act, code):
    target = tmp_path / "out"
    shutil.copytree(reference_folder("qwen2_tied"), target)
    script = SAVE_AND_DIE.format(source=str(reference_folder("qwen2_tied")), target=str(target), act=act)
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert ("No space left on device" in done.stderr) == (code == 1)
    assert raw_tensors(target) == raw_tensors(reference_folder("qwen2_tied"))
    model = QwenCausalLM.from_pretrained(target, dtype="float32")
    logits = keras.ops.convert_to_numpy(model(np.array([[1, 2, 3]])))
    assert np.isfinite(logits).all()
