"""What callbacks write into `logs`: the numbers, and that all others see them, wherever they stand."""

import csv
import time
from pathlib import Path

import keras
import numpy as np
import pytest

import keras_qwen as kq
from keras_qwen import devices
from keras_qwen.callbacks.gradient_norm import block_of
from keras_qwen.compute_estimate import flops_per_token, matrix_weights

from .small_model import CONFIG, INPUTS, LABELS, MASK, fresh


class Seen(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.batches = []

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(dict(logs))


def test_block_norms_are_those_of_the_gradient():
    """With plain SGD of rate 1, a step changes each weight by its gradient."""
    for micro_batch_size in (None, 2):
        model = fresh(keras.optimizers.SGD(1.0), micro_batch_size=micro_batch_size)
        before = [v.numpy() if hasattr(v, "numpy") else np.asarray(v) for v in model.get_weights()]
        history = model.fit(INPUTS, LABELS, batch_size=6, verbose=0, callbacks=[kq.callbacks.GradientNorm()]).history
        squares = {}
        for v, old, new in zip(model.weights, before, model.get_weights(), strict=True):
            squares[block_of(v.path)] = squares.get(block_of(v.path), 0.0) + np.square(new - old).sum()
        assert squares.keys() == {"embed_tokens", "layers_0", "layers_1", "norm", "lm_head"}
        for block, square in squares.items():
            assert history[f"gradient_norm/{block}"] == pytest.approx([np.sqrt(square)], rel=1e-4)
        assert history["gradient_norm"] == pytest.approx([np.sqrt(sum(squares.values()))], rel=1e-4)


def test_monitors_do_not_change_training_and_are_gone_without_their_callback():
    expected, model = fresh(), fresh()
    expected.fit(INPUTS, LABELS, batch_size=3, epochs=2, shuffle=False, verbose=0)
    watched = [kq.callbacks.GradientNorm(), kq.callbacks.LearningRate(), kq.callbacks.Throughput()]
    model.fit(INPUTS, LABELS, batch_size=3, shuffle=False, verbose=0, callbacks=watched)
    function = model.train_function
    history = model.fit(INPUTS, LABELS, batch_size=3, shuffle=False, verbose=0).history
    assert history.keys() == {"loss", "token_accuracy", "gradient_norm"} and model.train_function is not function
    for a, b in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_learning_rate_is_that_of_the_step():
    schedule = keras.optimizers.schedules.PolynomialDecay(1.0, 4, 0.0)
    model, seen = fresh(keras.optimizers.SGD(schedule)), Seen()
    model.fit(INPUTS, LABELS, batch_size=2, verbose=0, callbacks=[seen, kq.callbacks.LearningRate()])
    assert [logs["learning_rate"] for logs in seen.batches] == pytest.approx([1.0, 0.75, 0.5])


def test_all_see_what_is_written_wherever_they_stand(tmp_path, capsys):
    model, seen = fresh(), Seen()
    writers = [
        kq.callbacks.GradientNorm(),
        kq.callbacks.DeviceMemory(),
        kq.callbacks.Throughput(peak_flops=1e12),
        kq.callbacks.LearningRate(),
        kq.callbacks.ActivationStatistics(every=1),
    ]
    callbacks = [seen, keras.callbacks.CSVLogger(str(tmp_path / "log.csv")), *writers]
    history = model.fit(
        INPUTS, LABELS, validation_data=(INPUTS, LABELS), batch_size=3, epochs=2, verbose=2, callbacks=callbacks
    )
    names = {
        "gradient_norm/layers_1", "memory_in_use_gb", "memory_peak_gb", "memory_limit_gb", "tokens_per_second",
        "trained_tokens_per_second", "model_flops_utilization", "learning_rate", "activation_rms/layers_0",
        "activation_saturated/layers_1",
    }  # fmt: skip
    assert names <= seen.batches[0].keys() and names <= history.history.keys()
    assert all(len(values) == 2 for values in history.history.values())
    with open(tmp_path / "log.csv") as file:
        rows = list(csv.DictReader(file))
    assert names <= rows[0].keys()
    assert float(rows[1]["gradient_norm/layers_1"]) == history.history["gradient_norm/layers_1"][1]
    assert not any(name in history.history for name in ("tokens", "trained_tokens", "row_length", "val_learning_rate"))
    shown = capsys.readouterr().out
    assert "learning_rate" in shown and "layers_1" not in shown  # the progress bar has no room for the blocks


def test_a_keras_loss_has_no_step_to_monitor():
    model = fresh(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with pytest.raises(ValueError, match="GradientNorm needs the training step of the memory-saving loss"):
        model.fit(INPUTS, LABELS, verbose=0, callbacks=[kq.callbacks.GradientNorm()])


# memory --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def on_a_cpu():
    if devices._backend().device_name() is not None:
        pytest.skip("on an accelerator, its memory is what is reported")


def test_memory_of_the_process_grows_by_what_is_kept(on_a_cpu):
    before = devices.memory()
    kept = np.ones(100_000_000 // 8)
    after = devices.memory()
    assert 0.9e8 < after.in_use - before.in_use < 1.5e8
    del kept
    assert devices.memory().in_use < before.in_use + 0.5e8 and devices.memory().peak > after.in_use - 1e6
    assert after.in_use < after.limit


def test_a_container_has_less_than_the_machine(monkeypatch, tmp_path):
    machine = devices.process_memory().limit
    for text, expected in (("1000000\n", 1_000_000), ("max\n", None), (str(2**62), None)):
        (tmp_path / "memory.max").write_text(text)
        monkeypatch.setattr(devices, "Path", lambda path: tmp_path / Path(path).name)
        found = devices._machine_limit()
        assert found == expected if expected else found >= machine


# throughput ----------------------------------------------------------------------------------------------------------


class Clock:
    """One second for each look at it."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        self.now += 1.0
        return self.now


def test_throughput_counts_tokens_and_operations(monkeypatch):
    monkeypatch.setattr(kq.callbacks.throughput, "time", Clock())
    model, seen = fresh(), Seen()
    weights = np.ones(MASK.shape, "float32")
    weights[:, :4] = 0
    data = dict(x=INPUTS, y=LABELS, sample_weight=weights * MASK, batch_size=2, shuffle=False, verbose=0)
    history = model.fit(**data, epochs=2, callbacks=[kq.callbacks.Throughput(peak_flops=1e9), seen]).history
    assert [logs["tokens_per_second"] for logs in seen.batches] == [14.0] * 6
    assert [logs["trained_tokens_per_second"] for logs in seen.batches] == [6.0] * 6
    flops = flops_per_token(CONFIG, 8)
    assert history["model_flops_utilization"] == pytest.approx([14 * flops / 1e9] * 2)
    assert history["tokens_per_second"] == [14.0, 14.0]


def test_throughput_takes_frozen_weights_into_account(monkeypatch):
    monkeypatch.setattr(kq.callbacks.throughput, "time", Clock())
    model, seen = fresh(), Seen()
    model.get_layer("layers_0").trainable = False
    model.backbone.embed_tokens.trainable = False
    model.compile("sgd")
    model.fit(INPUTS, LABELS, batch_size=6, verbose=0, callbacks=[kq.callbacks.Throughput(peak_flops=1e9), seen])
    block = 16 * 16 * 2 + 2 * 16 * 8 + 3 * 16 * 24
    flops = flops_per_token(CONFIG, 8, trained_weights=matrix_weights(CONFIG) - block)
    assert seen.batches[0]["model_flops_utilization"] == pytest.approx(42 * flops / 1e9)


def test_peaks_are_of_known_devices_and_16_bits(monkeypatch):
    class Backend:
        device_name = staticmethod(lambda: "NVIDIA A100-SXM4-40GB")

    monkeypatch.setattr(devices, "_backend", lambda: Backend)
    assert devices.peak_flops("bfloat16") == 312e12 and devices.peak_flops("float32") is None
    Backend.device_name = staticmethod(lambda: "Some new thing")
    assert devices.peak_flops("bfloat16") is None
    Backend.device_name = staticmethod(lambda: None)
    assert devices.peak_flops("bfloat16") is None
    with pytest.raises(ValueError, match="peak_flops must be positive"):
        kq.callbacks.Throughput(peak_flops=0)


def test_throughput_is_near_the_clock():
    model = fresh()
    began = time.perf_counter()
    history = model.fit(
        INPUTS, LABELS, batch_size=2, epochs=3, verbose=0, callbacks=[kq.callbacks.Throughput()]
    ).history
    assert history["tokens_per_second"][2] > 42 * 3 / (time.perf_counter() - began)  # compiling is not in it
    assert "model_flops_utilization" not in history
