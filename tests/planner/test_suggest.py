"""suggest: what fits, the fastest first."""

import pytest

import keras_qwen as kq
from keras_qwen.planner.published import published

CONFIG = published("Qwen2.5-7B")


def test_ranks_what_fits():
    found = kq.suggest(CONFIG, devices=8, device_memory="H100", batch_size=16)
    assert [s.seconds for s in found[:10]] == sorted(s.seconds for s in found[:10])
    assert {s.method for s in found} == {"full", "lora", "qlora"}
    for one in found:
        assert one.plan.fits and one.plan.setup.devices == 8
        assert one.plan.setup.batch_size == 16
    text = str(found)
    assert "micro-batch" in text and text.count("\n") == len(found)


def test_a_consumer_card():
    small = published("Qwen2.5-1.5B")
    found = kq.suggest(small, devices=1, device_memory="16GB", batch_size=8, sequence_length=1024)
    assert "full" not in {s.method for s in found} and "qlora" in {s.method for s in found}
    assert all(s.plan.total_bytes <= 0.94 * 16e9 for s in found)


def test_nothing_fits():
    found = kq.suggest(CONFIG, devices=1, device_memory="4GB", methods=["full"])
    assert found == [] and "Nothing fits" in str(found)


def test_recomputing_costs_time_and_is_only_used_for_memory():
    found = kq.suggest(CONFIG, devices=8, device_memory="H200", batch_size=8, methods=["full"])
    assert found[0].plan.setup.remat is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"devices": 0}, "devices"), ({"devices": 1.5}, "devices"), ({"methods": ["dora"]}, "methods")],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        kq.suggest(CONFIG, **({"devices": 1, "device_memory": "80GB"} | arguments))
