"""The same code on the torch backend: logits, training and generation of the golden checkpoints."""

import keras
import numpy as np
import pytest

from keras_qwen import QwenCausalLM

pytestmark = pytest.mark.skipif(keras.backend.backend() != "torch", reason="a smoke test of the torch backend")


@pytest.fixture(params=["qwen2", "qwen2_sliding", "qwen3_tied"])
def golden(request, reference_folder):
    folder = reference_folder(request.param)
    return QwenCausalLM.from_pretrained(folder, dtype="float32"), np.load(folder / "expected.npz")


def test_logits_and_greedy_tokens(golden):
    model, want = golden
    inputs = {"token_ids": want["input_ids"], "padding_mask": want["attention_mask"]}
    logits, real = keras.ops.convert_to_numpy(model(inputs)), want["attention_mask"].astype(bool)
    np.testing.assert_allclose(logits[real], want["logits"][real], atol=3e-5)
    new = model.generate(want["prompt"], max_new_tokens=8, temperature=0.0, stop=[])
    assert new == want["greedy"].tolist()


@pytest.mark.parametrize("micro_batch_size", [None, 1])
@pytest.mark.parametrize("remat", [None, "block"])
def test_fit(golden, micro_batch_size, remat):
    model, want = golden
    model.remat = remat
    ids, mask = want["input_ids"], want["attention_mask"]
    labels = np.concatenate([ids[:, 1:], np.zeros_like(ids[:, :1])], 1)
    weights = np.concatenate([mask[:, 1:], np.zeros_like(mask[:, :1])], 1).astype("float32")
    model.compile(keras.optimizers.SGD(1.0), micro_batch_size=micro_batch_size)
    before = {v.path: keras.ops.convert_to_numpy(v).copy() for v in model.weights}
    inputs = {"token_ids": ids, "padding_mask": mask}
    history = model.fit(inputs, labels, sample_weight=weights, batch_size=2, verbose=0).history
    assert history["loss"][0] == pytest.approx(want["loss"], rel=1e-5)
    step = {v.path: before[v.path] - keras.ops.convert_to_numpy(v) for v in model.weights}
    norm = np.sqrt(sum((s.astype("float64") ** 2).sum() for s in step.values()))
    assert norm == pytest.approx(float(want["grad_norm"]), rel=3e-5)
    expected = want["grad/model.layers.0.self_attn.q_proj.weight"].T
    found = step["layers_0/self_attn/q_proj/kernel"]
    assert np.linalg.norm(found - expected) <= 3e-5 * np.linalg.norm(expected)
