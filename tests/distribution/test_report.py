"""The table of what lies where."""

import keras
import pytest

import keras_qwen as kq


def test_without_a_mesh(reference_folder):
    model = kq.QwenCausalLM.from_pretrained(reference_folder("qwen2_tied"), dtype="float32")
    found = kq.distribution.report(model)
    assert found.devices == 1 and found.replicated_share == 0
    assert found.device_bytes == sum(4 * v.size for v in map(keras.ops.convert_to_numpy, model.weights))
    assert "embed_tokens/embeddings" in str(found) and "on 1 devices" in str(found)


REPORT = """
config = kq.QwenConfig.from_pretrained(arguments["folder"])
keras.distribution.set_distribution(kq.distribution.model_parallel(config, {"data": 2, "model": 4}))
model = kq.QwenCausalLM.from_pretrained(arguments["folder"], dtype="float32")
model.compile("adamw")
model.make_train_function()
one, both = kq.distribution.report(model), kq.distribution.report(model, optimizer=True)
rows = {row.path.split("/", 1)[-1] if row.path.startswith("qwen") else row.path: row for row in one.rows}
actual = sum(v.value.addressable_shards[0].data.nbytes for v in model.weights)
report(
    text=str(one), bytes=one.device_bytes, actual=actual, share=one.replicated_share,
    more=len(both.rows) - len(one.rows),
    state=sum(r.device_bytes for r in both.rows[len(one.rows):] if r.shape), notes=[r.note for r in one.rows if r.note],
    copies=[r.copies for r in one.rows if r.path.endswith(("k_proj/kernel", "gate_proj/kernel"))],
)
"""


def test_on_a_mesh(on_devices, reference_folder):
    [found] = on_devices(REPORT, folder=str(reference_folder("qwen2_tied")))
    assert found["bytes"] == found["actual"] and found["state"] == 2 * found["bytes"]
    assert found["share"] == pytest.approx(1.0)  # over data, all is there twice
    assert set(found["copies"]) == {8, 2} and found["more"] > 0
    assert any("2 key/value heads are not divided by model=4" in note for note in found["notes"])
    assert "(None" not in found["text"] and "model" in found["text"]
