"""Models with a quantised base: loading, what they compute, adapters on top, and the way back to full weights."""

import json
import shutil
import warnings

import keras
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from keras_qwen import QwenBackbone, QwenCausalLM
from keras_qwen.ops import row_matmul
from keras_qwen.ops.quantization import KINDS, Quantized, quantize
from keras_qwen.parameters import match_variables, parameter_table, projections, quantized_table

Q = "model.layers.1.self_attn.q_proj.weight"


def numpy(x):
    return keras.ops.convert_to_numpy(keras.ops.cast(x, "float32"))


def load(folder, kind, dtype="float32", cls=QwenCausalLM, **settings):
    return cls.from_pretrained(folder, dtype=dtype, quantization=kind, **settings)


@pytest.fixture
def checkpoint(tmp_path, reference_folder):
    """A function that copies a reference checkpoint in another dtype, changed by a function."""

    def make(name="qwen2", dtype=None, change=None):
        folder = tmp_path / name
        shutil.copytree(reference_folder(name), folder)
        tensors = safetensors.numpy.load_file(folder / "model.safetensors")
        tensors = {n: t.astype(dtype or t.dtype) for n, t in tensors.items()}
        if change is not None:
            change(tensors)
        safetensors.numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return make


def batch(folder):
    want = np.load(folder / "expected.npz")
    return {"token_ids": want["input_ids"], "padding_mask": want["attention_mask"]}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["qwen2", "qwen3_tied"])
def test_logits_are_those_of_the_dequantised_kernels(reference_folder, kind, name):
    folder = reference_folder(name)
    model, full = load(folder, kind), QwenCausalLM.from_pretrained(folder, dtype="float32")
    before = numpy(full(batch(folder)))
    table = parameter_table(full.config)
    matched = match_variables(table, full.variables)
    for row in projections(table).values():
        kernel = numpy(matched[row.path])
        quantized = Quantized(kind, *row.shape)
        parts = quantize(quantized, lambda start, stop, kernel=kernel: kernel[:, start:stop])
        matched[row.path].assign(quantized.dequantize({n: keras.ops.convert_to_tensor(p) for n, p in parts.items()}))
    logits = numpy(model(batch(folder)))
    np.testing.assert_allclose(logits, numpy(full(batch(folder))), atol=1e-5, rtol=0)
    np.testing.assert_allclose(logits, numpy(model.dequantize()(batch(folder))), atol=1e-5, rtol=0)
    difference = np.sqrt(np.mean((logits - before) ** 2)) / np.std(before)
    assert 1e-3 < difference < (0.03 if kind == "int8" else 0.5)  # it is quantised, and still the same model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cls", [QwenCausalLM, QwenBackbone])
def test_the_table_accounts_for_every_variable(reference_folder, kind, cls):
    model = load(reference_folder("qwen2"), kind, cls=cls)
    table = quantized_table(cls.parameter_table(model.config), kind)
    matched = match_variables(table, model.variables)
    assert len(matched) == len(table) == len(model.variables)
    plain = {row.hf_name: row for row in cls.parameter_table(model.config)}
    for row in table:
        assert row.hf_shape == plain[row.hf_name].hf_shape and len(row.axes) == len(row.shape)
        if row.quantized is None:
            assert row == plain[row.hf_name]
        else:
            assert keras.backend.standardize_dtype(matched[row.path].dtype) == row.quantized.parts[row.part].dtype
    assert quantized_table(table, None) is table
    assert model.quantization == kind


@pytest.mark.parametrize(("kind", "bits"), [("int8", 8.7), ("int4", 6.5), ("nf4", 6)])
def test_memory_of_a_bfloat16_checkpoint(checkpoint, kind, bits):
    model = load(checkpoint(dtype=ml_dtypes.bfloat16), kind)
    table = quantized_table(model.parameter_table(model.config), kind)
    quantised = {row.hf_name: row.quantized for row in table if row.quantized}
    others = [row for row in table if not row.quantized]
    assert sum(np.prod(v.shape) * np.dtype(v.dtype).itemsize for v in model.variables) == (
        sum(2 * row.size for row in others) + sum(q.nbytes for q in quantised.values())
    )
    # 48 inputs fill a group of 64 only in part, so that there are more bits than in a model of ordinary size.
    weights = sum(q.inputs * q.outputs for q in quantised.values())
    assert sum(q.nbytes for q in quantised.values()) * 8 / weights < bits


@pytest.mark.parametrize(
    ("stored", "dtype", "held"),
    [
        ("bfloat16", "float32", "bfloat16"),
        ("bfloat16", "mixed_bfloat16", "bfloat16"),
        ("float16", "float32", "float16"),
        ("float32", "mixed_bfloat16", "float32"),
        ("bfloat16", "bfloat16", "bfloat16"),
    ],
)
def test_what_is_not_quantised_stays_as_stored(checkpoint, stored, dtype, held):
    folder = checkpoint(dtype=np.dtype(stored) if stored != "bfloat16" else ml_dtypes.bfloat16)
    model = load(folder, "nf4", dtype=dtype)
    kept = {keras.backend.standardize_dtype(v.dtype) for v in model.variables if "/kernel_" not in v.path}
    assert kept == {held} and model.dtype_policy.name == dtype
    assert np.isfinite(numpy(model(batch(folder)))).all()
    stored = safetensors.numpy.load_file(folder / "model.safetensors")["model.norm.weight"]
    np.testing.assert_array_equal(numpy(model.backbone.norm.scale), stored.astype("float32"))


def test_everything_is_frozen_and_fit_says_so(reference_folder):
    model = load(reference_folder("qwen2_tied"), "nf4")
    assert model.trainable_variables == []
    model.compile(keras.optimizers.SGD(0.1))
    inputs = batch(reference_folder("qwen2_tied"))
    with pytest.raises(ValueError, match="quantised base is frozen: enable_lora"):
        model.fit(inputs, inputs["token_ids"], verbose=0)
    with pytest.raises(ValueError, match="matches no variable"):
        model.train_only("q_proj/kernel")


@pytest.mark.parametrize(("kind", "remat"), [("int8", None), ("nf4", "block")])
def test_lora_learns(checkpoint, kind, remat):
    folder = checkpoint("qwen2_tied", ml_dtypes.bfloat16)
    model = load(folder, kind, remat=remat)
    model.enable_lora(4, alpha=8)
    base = [numpy(v) for v in model.weights if "lora" not in v.path]
    with warnings.catch_warnings():  # bfloat16 variables that are not trained are nothing to warn of
        warnings.simplefilter("error")
        model.compile(keras.optimizers.Adam(1e-2))
    inputs = batch(folder)
    losses = model.fit(inputs, np.roll(inputs["token_ids"], -1, 1), epochs=6, verbose=0).history["loss"]
    assert losses[-1] < losses[0] - 0.2
    for before, variable in zip(base, [v for v in model.weights if "lora" not in v.path], strict=True):
        np.testing.assert_array_equal(numpy(variable), before)


@pytest.mark.parametrize(
    ("kind", "settings"), [("int4", {}), ("nf4", {}), ("nf4", {"targets": ["q_proj"]})], ids=["int4", "nf4", "q_proj"]
)
def test_gradients_are_those_of_the_dequantised_model(checkpoint, kind, settings):
    folder = checkpoint("qwen2_tied", ml_dtypes.bfloat16)
    model = load(folder, kind)
    full = model.dequantize()
    inputs, gradients = batch(folder), []
    for one in (model, full):
        one.enable_lora(4, **settings)
        adapter = [v for v in one.weights if "lora" in v.path]
        rng = np.random.default_rng(0)
        before = [rng.normal(size=v.shape).astype("float32") * 0.1 for v in adapter]
        for variable, value in zip(adapter, before, strict=True):
            variable.assign(value)
        one.compile(keras.optimizers.SGD(1.0))
        one.train_on_batch(inputs, np.roll(inputs["token_ids"], -1, 1))
        gradients.append([b - numpy(v) for v, b in zip(adapter, before, strict=True)])
    for ours, theirs in zip(*gradients, strict=True):
        assert np.linalg.norm(theirs) > 0
        assert np.linalg.norm(ours - theirs) <= 1e-5 * max(np.linalg.norm(theirs), 0.1)


def test_an_adapter_is_merged_with_the_base_it_was_trained_on(checkpoint, tmp_path):
    folder = checkpoint("qwen2", ml_dtypes.bfloat16)
    model = load(folder, "nf4")
    model.enable_lora(4, alpha=8, use_dora=True)
    rng = np.random.default_rng(0)
    for variable in model.trainable_variables:
        variable.assign(numpy(variable) + rng.normal(size=variable.shape) * 0.05)
    logits = numpy(model(batch(folder)))
    with pytest.raises(ValueError, match=r"model\.dequantize\(\) gives a model with full weights"):
        model.merge_adapter()
    np.testing.assert_array_equal(numpy(model(batch(folder))), logits)  # what fails changes nothing
    model.save_adapter(tmp_path / "adapter")
    full = model.dequantize()
    np.testing.assert_allclose(numpy(full(batch(folder))), logits, atol=2e-5)
    full.merge_adapter()
    np.testing.assert_allclose(numpy(full(batch(folder))), logits, atol=2e-5)
    full.save_pretrained(tmp_path / "merged")
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["dtype"] == "float32"
    again = QwenCausalLM.from_pretrained(tmp_path / "merged", dtype="float32")
    np.testing.assert_allclose(numpy(again(batch(folder))), logits, atol=2e-5)
    other = load(folder, "nf4")
    other.load_adapter(tmp_path / "adapter")
    np.testing.assert_allclose(numpy(other(batch(folder))), logits, atol=1e-5)


def test_dequantised_variables_are_the_stored_ones_or_exact(checkpoint):
    model = load(checkpoint("qwen3_tied", ml_dtypes.bfloat16), "int4")
    full = model.dequantize()
    assert full.quantization is None and full.dtype_policy.name == "float32"
    assert {v.dtype for v in full.variables} == {"float32"} and len(full.trainable_variables) == len(full.variables)
    mine = {v.path: v for v in model.variables}
    for variable in full.variables:
        if variable.path in mine:
            np.testing.assert_array_equal(numpy(variable), numpy(mine[variable.path]))
        else:
            layer = next(x for x in model._flatten_layers() if f"{x.path}/kernel" == variable.path)
            np.testing.assert_array_equal(numpy(variable), numpy(layer.full_kernel()))
    with pytest.raises(ValueError, match="not quantised"):
        full.dequantize()


@pytest.mark.parametrize(("kind", "dtype"), [("int8", None), ("int4", None), ("nf4", ml_dtypes.bfloat16)])
def test_generation_is_that_of_the_dequantised_model(checkpoint, monkeypatch, kind, dtype):
    monkeypatch.setattr(row_matmul, "_SMALL", 1)  # take the paths of large matrices
    model = load(checkpoint("qwen3_tied", dtype), kind)
    arguments = dict(max_new_tokens=8, temperature=0, stop=[])
    assert model.generate([5, 6, 7], **arguments) == model.dequantize().generate([5, 6, 7], **arguments)


def test_what_needs_full_weights_is_refused(reference_folder, tmp_path):
    model = load(reference_folder("qwen2_tied"), "int4")
    with pytest.raises(ValueError, match=r"quantised \(int4\), and save_pretrained needs full weights: .*dequantize"):
        model.save_pretrained(tmp_path / "x")
    assert not (tmp_path / "x").exists()
    with pytest.raises(ValueError, match=r"quantised already \(int4\)"):
        model.quantize("int8")
    with pytest.raises(ValueError, match="quantised while they are loaded"):
        model.dequantize().quantize("int8")
    for dtype in (model.dtype_policy, "int8_from_float32"):
        with pytest.raises(ValueError, match="quantised already; give quantization='nf4' a policy that is not"):
            load(reference_folder("qwen2_tied"), "nf4", dtype=dtype)
    with pytest.raises(ValueError, match="quantization='q4' is not known; known are 'int8', 'int4', 'nf4'"):
        load(reference_folder("qwen2_tied"), "q4")


@pytest.mark.parametrize("kind", KINDS)
def test_not_finite_weights_name_tensor_and_file(checkpoint, kind):
    def change(tensors):
        tensors[Q][3, 5] = np.nan

    with pytest.raises(ValueError, match=rf"Tensor {Q} in .*model\.safetensors holds NaN"):
        load(checkpoint(change=change), kind)


def test_it_is_saved_and_loaded_by_keras(reference_folder, tmp_path):
    folder = reference_folder("qwen2_tied")
    model = load(folder, "nf4")
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert again.quantization == "nf4"
    np.testing.assert_array_equal(numpy(again(batch(folder))), numpy(model(batch(folder))))
