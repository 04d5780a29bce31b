"""The golden checkpoints: logits, losses, gradients and steps are those of transformers."""

import keras
import numpy as np
import pytest
import safetensors.numpy

from keras_qwen import QwenCausalLM

DENSE = ["qwen2", "qwen2_tied", "qwen2_sliding", "qwen2_yarn", "qwen2_linear", "qwen3", "qwen3_tied"]


@pytest.fixture(scope="module", params=DENSE)
def golden(request, reference_folder):
    """(name, folder, expected arrays, a model that no test trains)."""
    folder = reference_folder(request.param)
    model = QwenCausalLM.from_pretrained(folder, dtype="float32")
    return request.param, folder, np.load(folder / "expected.npz"), model


def numpy(x):
    return keras.ops.convert_to_numpy(x)


def targets(want):
    ids, mask = want["input_ids"], want["attention_mask"]
    labels = np.concatenate([ids[:, 1:], np.zeros_like(ids[:, :1])], 1)
    weights = np.concatenate([mask[:, 1:], np.zeros_like(mask[:, :1])], 1).astype("float32")
    return {"token_ids": ids, "padding_mask": mask}, labels, weights


def test_logits_with_right_and_left_padding(golden):
    _, _, want, model = golden
    ids, mask, length = want["input_ids"], want["attention_mask"], want["input_ids"].shape[1]
    logits = numpy(model({"token_ids": ids, "padding_mask": mask}))
    real = mask.astype(bool)
    np.testing.assert_allclose(logits[real], want["logits"][real], atol=3e-5, rtol=0)
    left_ids, left_mask = np.zeros_like(ids), np.zeros_like(mask)
    for row, n in enumerate(mask.sum(1)):
        left_ids[row, length - n :], left_mask[row, length - n :] = ids[row, :n], 1
    left = numpy(model({"token_ids": left_ids, "padding_mask": left_mask}))
    for row, n in enumerate(mask.sum(1)):
        np.testing.assert_allclose(left[row, length - n :], want["logits"][row, :n], atol=3e-5, rtol=0)


def test_logits_of_packed_documents(golden):
    _, _, want, model = golden
    segments = np.cumsum(want["packed_positions"] == 0, axis=1).astype("int32")
    packed = numpy(model({"token_ids": want["packed_ids"], "segment_ids": segments}))
    np.testing.assert_allclose(packed, want["packed_logits"], atol=3e-5, rtol=0)


@pytest.mark.parametrize("micro_batch_size", [None, 1])
def test_loss_and_gradients(golden, tmp_path, micro_batch_size):
    name, folder, want, _ = golden
    if micro_batch_size and name not in ("qwen2", "qwen3_tied"):
        return
    model = QwenCausalLM.from_pretrained(folder, dtype="float32")
    model.compile(keras.optimizers.SGD(1.0), micro_batch_size=micro_batch_size)
    inputs, labels, weights = targets(want)
    arguments = dict(sample_weight=weights, batch_size=2, verbose=0)
    assert model.evaluate(inputs, labels, return_dict=True, **arguments)["loss"] == pytest.approx(
        want["loss"], rel=1e-5
    )
    history = model.fit(inputs, labels, shuffle=False, **arguments).history
    assert history["loss"][0] == pytest.approx(want["loss"], rel=1e-5)
    right = (want["logits"].argmax(-1) == labels) * weights
    assert history["token_accuracy"][0] == pytest.approx(right.sum() / weights.sum(), abs=1e-6)
    model.save_pretrained(tmp_path)
    before = safetensors.numpy.load_file(folder / "model.safetensors")
    after = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    step = {n: before[n].astype("float64") - after[n] for n in before}
    for key in (k for k in want.files if k.startswith("grad/")):
        assert np.linalg.norm(step[key[5:]] - want[key]) <= 3e-5 * np.linalg.norm(want[key]), key
    norm = np.sqrt(sum((s**2).sum() for s in step.values()))
    assert norm == pytest.approx(float(want["grad_norm"]), rel=3e-5)


def test_three_adamw_steps_with_repeated_tokens(golden, tmp_path):
    name, folder, want, _ = golden
    model = QwenCausalLM.from_pretrained(folder, dtype="float32")
    model.compile(keras.optimizers.AdamW(1e-3, epsilon=1e-8, weight_decay=0.0))
    ids = want["adamw_ids"]
    weights = np.ones(ids.shape, "float32")
    weights[:, -1] = 0
    model.fit(ids, np.roll(ids, -1, 1), sample_weight=weights, batch_size=2, shuffle=False, verbose=0)
    model.save_pretrained(tmp_path)
    before = safetensors.numpy.load_file(folder / "model.safetensors")
    after = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    for key in (k for k in want.files if k.startswith("adamw/")):
        expected = want[key] - before[key[6:]]
        moved = after[key[6:]] - before[key[6:]]
        assert np.linalg.norm(moved - expected) <= 0.015 * np.linalg.norm(expected), key
