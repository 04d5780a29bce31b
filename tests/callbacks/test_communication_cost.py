"""What is sent in a step of training."""

import keras
import pytest

from keras_qwen.callbacks import CommunicationCost
from tests.callbacks.small_model import INPUTS, LABELS, fresh

TRAIN = """
import warnings
config = kq.QwenConfig.from_pretrained(arguments["folder"])
keras.distribution.set_distribution(kq.distribution.model_parallel(config, {"data": 4, "model": 2}))
model = kq.QwenCausalLM.from_pretrained(arguments["folder"], dtype="float32")
model.compile("sgd")
ids = np.random.default_rng(0).integers(0, config.vocab_size, (24, 17)).astype("int32")
cost = kq.callbacks.CommunicationCost()
fit = dict(batch_size=8, epochs=2, verbose=0, callbacks=[cost])
history = model.fit(ids[:, :-1], ids[:, 1:], **fit).history
weights = sum(v.value.addressable_shards[0].data.nbytes for v in model.trainable_variables)
report(history=history, weights=weights, kinds=sorted({c.kind for c in cost.collectives}))
"""


def test_bytes_and_share(on_devices, reference_folder):
    [found] = on_devices(TRAIN, folder=str(reference_folder("qwen2_tied")))
    history = found["history"]
    total = history["communication_bytes"]
    by_axis = {name: values for name, values in history.items() if name.startswith("communication_bytes/")}
    assert total[0] == total[1] == pytest.approx(sum(values[0] for values in by_axis.values()))
    # Every gradient is reduced over data: twice three quarters of its bytes, and hardly more.
    assert history["communication_bytes/data"][0] == pytest.approx(1.5 * found["weights"], rel=0.25)
    assert history["communication_bytes/model"][0] > 0 and "all-reduce" in found["kinds"]
    if "communication_share" in history:
        assert all(0 <= share <= 1 for share in history["communication_share"])


def test_it_needs_a_mesh():
    model = fresh()
    with pytest.raises(ValueError, match="distribution"):
        model.fit(INPUTS, LABELS, verbose=0, callbacks=[CommunicationCost()])
    assert keras.distribution.distribution() is None
