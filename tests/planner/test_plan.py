"""plan, what it says, and the largest that fits."""

import time

import pytest

import keras_qwen as kq
from keras_qwen.planner.published import NAMES, published

CONFIG = published("Qwen2.5-32B")


def test_a_plan_in_less_than_a_second():
    start = time.process_time()
    for name in ("Qwen2.5-32B", "Qwen2.5-72B"):
        kq.plan(published(name), mesh={"fsdp": 2, "model": 8}, batch_size=8, sequence_length=4096)
    assert time.process_time() - start < 2.0


def test_what_a_plan_says():
    plan = kq.plan(
        CONFIG, mesh={"fsdp": 2, "model": 8}, batch_size=8, sequence_length=4096, device_memory="A100-80",
        sequence_parallel=True,
    )  # fmt: skip
    assert plan.total_bytes == sum(plan.categories.values()) and plan.fits
    assert plan.usable_bytes == int(0.94 * 80e9)
    assert plan.flops_per_step == pytest.approx(6 * 32.0e9 * 8 * 4096, rel=0.08)  # 6 N for each token, and attention
    assert plan.recomputing == pytest.approx(4 / 3)
    assert plan.floor_seconds > plan.flops_per_step * 4 / 3 / (312e12 * 16)
    text = str(plan)
    assert "fits into 75.20 GB" in text and "saved activations" in text and "over 'model'" in text
    unknown = kq.plan(CONFIG)
    assert unknown.fits is None and unknown.floor_seconds is None and "fits" not in str(unknown)


def test_key_value_cache():
    plan = kq.plan(CONFIG, mesh={"model": 4})
    assert plan.kv_cache_bytes(2, 1000) == 2 * 64 * 2 * 1000 * 2 * 128 * 2
    assert kq.plan(CONFIG, mesh={"model": 3}).kv_cache_bytes(1, 1) == 2 * 64 * 8 * 128 * 2


def test_the_largest_that_fits():
    plan = kq.plan(published("Qwen2.5-1.5B"), mesh={"data": 2}, batch_size=2, sequence_length=512, device_memory="40GB")
    rows = plan.largest("batch_size")
    assert rows % 2 == 0
    assert plan.replaced(batch_size=rows).fits and not plan.replaced(batch_size=rows + 2).fits
    length = plan.largest("sequence_length")
    assert length % 128 == 0
    assert plan.replaced(sequence_length=length).fits and not plan.replaced(sequence_length=length + 128).fits
    name = plan.largest("model")
    assert plan.replaced(config=published(name)).fits
    assert not plan.replaced(config=published(NAMES[NAMES.index(name) + 1])).fits
    tiny = kq.plan(CONFIG, device_memory="1GB")
    assert tiny.largest("batch_size") is None and tiny.largest("model") is None


def test_what_largest_refuses():
    plan = kq.plan(CONFIG, batch_size=4, micro_batch_size=2, device_memory="80GB")
    with pytest.raises(ValueError, match="micro_batch_size"):
        plan.largest("batch_size")
    with pytest.raises(ValueError, match="'layers'"):
        plan.largest("layers")
    with pytest.raises(ValueError, match="device_memory"):
        kq.plan(CONFIG).largest("batch_size")


def test_a_picture(tmp_path):
    from keras_qwen.memory_estimate import CATEGORIES

    plan = kq.plan(CONFIG, mesh={"fsdp": 2, "model": 8}, batch_size=8, device_memory="80GB")
    figure = plan.plot(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes()[:4] == b"\x89PNG"
    ax = figure.axes[0]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [c.replace("_", " ") for c in CATEGORIES]
    widths = [bar.get_width() for bars in ax.containers for bar in bars]
    assert sum(widths) == pytest.approx(plan.total_bytes / 1e9)


def test_published_names():
    for name in ("Qwen/Qwen2.5-32B-Instruct", "Qwen2.5-32B", "Qwen/Qwen2.5-Coder-32B-Instruct"):
        assert published(name).num_hidden_layers == 64
    assert published("Qwen2.5-33B") is None and published("folder") is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mesh": {"model": 0}}, "positive"), ({"batch_size": -1}, "batch_size"), ({"device_memory": "many"}, "Memory"),
        ({"config": "Qwen2.5-32B"}, "QwenConfig"), ({"quantization": "nf4"}, "lora_rank"),
    ],
)  # fmt: skip
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        kq.plan(**({"config": CONFIG} | arguments))
