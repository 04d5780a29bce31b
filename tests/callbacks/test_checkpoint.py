"""Checkpoint besides resuming: what is kept, what is best, and what it says when something is wrong."""

import json
import os
import resource
import signal

import keras
import numpy as np
import pytest

import keras_qwen as kq

from .small_model import CONFIG, IDS, INPUTS, LABELS, fresh

X = np.random.default_rng(0).normal(size=(6, 3)).astype("float32")
Y = np.random.default_rng(1).normal(size=(6, 2)).astype("float32")


def dense(optimizer=None):
    """A model that compiles quickly; most of what `Checkpoint` does has nothing to do with Qwen."""
    keras.utils.clear_session(free_memory=False)
    layers = [keras.layers.Dense(n, kernel_initializer=keras.initializers.GlorotUniform(seed=n)) for n in (4, 2)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    model.compile(optimizer or keras.optimizers.AdamW(1e-2), loss="mse")
    return model


def fit(folder, *, model=None, data=(X, Y), epochs=2, more=(), batch_size=2, **settings):
    model = model or dense()
    callbacks = [kq.callbacks.Checkpoint(folder, **settings), *more]
    arguments = dict(batch_size=batch_size, epochs=epochs, verbose=0, callbacks=callbacks)
    if isinstance(model, kq.QwenCausalLM):
        return model, model.fit(INPUTS, LABELS, **arguments).history
    return model, kq.training.fit(model, *data, **arguments).history


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_keeps_the_newest(tmp_path):
    fit(tmp_path / "epochs", keep=1)
    assert names(tmp_path / "epochs") == ["step_00000006"]
    fit(tmp_path / "steps", keep=3, every=2)
    assert names(tmp_path / "steps") == ["step_00000002", "step_00000004", "step_00000006"]
    fit(tmp_path / "end", every=4)  # the end of training is saved as well
    assert names(tmp_path / "end") == ["step_00000004", "step_00000006"]


def test_only_what_is_trained_is_saved_unless_told(tmp_path):
    sizes = {}
    for weights in ("trainable", "all"):
        model = fresh()
        model.get_layer("layers_0").trainable = False
        model.compile("sgd")
        fit(tmp_path / weights, model=model, weights=weights, epochs=1)
        sizes[weights] = (tmp_path / weights / "step_00000003" / "variables.safetensors").stat().st_size
    frozen = sum(np.prod(v.shape) * 4 for v in model.get_layer("layers_0").weights)
    assert frozen < sizes["all"] - sizes["trainable"] < frozen + 2000


class SetMetric(keras.callbacks.Callback):
    """Dictates a metric, epoch by epoch, and remembers the weights."""

    writes_logs = True

    def __init__(self, values):
        super().__init__()
        self.values, self.weights = list(values), []

    def on_epoch_end(self, epoch, logs=None):
        logs["quality"] = self.values[epoch]
        self.weights.append(self.model.get_weights())


@pytest.mark.parametrize(("mode", "best"), [(None, 1), ("max", 2)])
def test_the_best_is_kept_as_a_checkpoint_of_its_own(mode, best, tmp_path):
    metric = SetMetric([2.0, 1.0, 3.0, float("nan")])
    fit(tmp_path, model=fresh(), epochs=4, best="quality", mode=mode, more=[metric])
    loaded = kq.QwenCausalLM.from_pretrained(tmp_path / "best", dtype="float32")
    for a, b in zip(loaded.get_weights(), metric.weights[best], strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_best_so_far_is_remembered(tmp_path):
    fit(tmp_path, model=fresh(), epochs=1, best="quality", more=[SetMetric([1.0, 2.0])])
    before = (tmp_path / "best" / "model.safetensors").read_bytes()
    fit(tmp_path, model=fresh(), epochs=2, best="quality", more=[SetMetric([1.0, 2.0])])
    assert (tmp_path / "best" / "model.safetensors").read_bytes() == before
    with pytest.raises(ValueError, match="best='qualty' is not in logs, which have .*loss"):
        fit(tmp_path / "other", best="qualty")


def test_a_finished_run_is_not_trained_again_and_a_longer_one_goes_on(tmp_path, capsys):
    straight, expected = fit(tmp_path / "straight", epochs=3, seed=1)
    fit(tmp_path / "run", epochs=2, seed=1)
    model, history = fit(tmp_path / "run", epochs=2, seed=1)
    assert "training is done (6 steps). To train anew, delete" in capsys.readouterr().out
    assert history["loss"] == expected["loss"][:2]
    model, history = fit(tmp_path / "run", epochs=3, seed=1)
    assert history == expected
    for a, b in zip(model.get_weights(), straight.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_run_that_was_stopped_early_is_done(tmp_path):
    class StopAfterFirst(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = True

    fit(tmp_path, epochs=5, more=[StopAfterFirst()])
    _, history = fit(tmp_path, epochs=5)
    assert len(history["loss"]) == 1


# what differs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda: dict(model=dense(keras.optimizers.AdamW(2e-2))),
            "optimizer.config.learning_rate: 0.0.* then, 0.0.* now",
        ),
        (lambda: dict(model=dense("sgd")), "optimizer.class_name: AdamW then, SGD now"),
        (lambda: dict(data=(X[::-1], Y)), "data.arrays: float32.* then"),
        (lambda: dict(batch_size=3), "data.batch_size: 2 then, 3 now"),
    ],
    ids=["rate", "optimizer", "data", "batch size"],
)
def test_another_run_is_refused_and_what_differs_is_named(change, words, tmp_path):
    fit(tmp_path, epochs=1)
    with pytest.raises(ValueError, match=f"(?s)holds the states of another run:.*{words}"):
        fit(tmp_path, **change())


def test_another_config_tokenizer_or_base_is_refused(tmp_path):
    def frozen_model(text, shift, config=CONFIG):
        model = fresh(config=config)
        model.tokenizer = kq.QwenTokenizer.train([text], 300)
        kernel = model.get_layer("layers_0").mlp.up_proj.kernel
        kernel.assign(keras.ops.convert_to_numpy(kernel.value) + shift)
        model.get_layer("layers_0").trainable = False
        model.compile("sgd")
        return model

    fit(tmp_path, model=frozen_model("abcabc", 0), epochs=1)
    with pytest.raises(ValueError, match="tokenizer: [0-9a-f]{16} then, [0-9a-f]{16} now"):
        fit(tmp_path, model=frozen_model("xyzxyz", 0))
    with pytest.raises(ValueError, match="config.rope_theta: .* then, 500000.0 now"):
        fit(tmp_path, model=frozen_model("abcabc", 0, CONFIG.replace(rope_theta=5e5)))
    with pytest.raises(ValueError, match="frozen weights: .* then, .* now"):
        fit(tmp_path, model=frozen_model("abcabc", 1))


def test_a_damaged_state_is_named(tmp_path):
    fit(tmp_path, epochs=1)
    file = tmp_path / "step_00000003" / "variables.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(OSError, match="variables.safetensors has .* truncated"):
        fit(tmp_path)


def test_fit_of_another_package_has_to_be_called_in_our_way(tmp_path):
    with pytest.raises(ValueError, match="keras_qwen.training.fit"):
        dense().fit(X, Y, callbacks=[kq.callbacks.Checkpoint(tmp_path)])


# failures ------------------------------------------------------------------------------------------------------------


class At(keras.callbacks.Callback):
    """Does something after a step."""

    def __init__(self, step, action):
        super().__init__()
        self.step, self.action = step, action

    def on_train_batch_end(self, batch, logs=None):
        self.step -= 1
        if not self.step:
            self.action(self.model)


def poison(model):
    kernel = model.layers[-1].kernel
    kernel.assign(np.full(kernel.shape, np.nan))


def test_nan_stops_names_the_step_and_keeps_the_last_good_state(tmp_path):
    with pytest.raises(ValueError, match="loss is nan in step 4 .epoch 2, batch 1.; the last good state is .*000003"):
        fit(tmp_path, every=1, keep=5, more=[At(3, poison)])
    # Step 3 was saved with the poisoned weights of our callback; what training itself does is caught before.
    assert names(tmp_path)[-1] == "step_00000003"


def test_a_gradient_that_is_not_finite_stops_before_the_weights_are_saved(tmp_path):
    model, weights = fresh(), np.ones(IDS.shape, "float32")
    weights[4:] = np.inf
    callbacks = [kq.callbacks.Checkpoint(tmp_path, every=1)]
    data = dict(x=INPUTS, y=LABELS, sample_weight=weights, batch_size=2, shuffle=False, verbose=0)
    with pytest.raises(ValueError, match="is (nan|inf) in step 3.*last good state is .*step_00000002"):
        model.fit(**data, callbacks=callbacks)
    assert names(tmp_path)[-1] == "step_00000002"


def test_a_full_disk_names_the_folder_and_leaves_the_older_state(tmp_path):
    fit(tmp_path, epochs=1)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (256, limits[1]))
    try:
        with pytest.raises(
            OSError, match=f"step 6 cannot be saved in {tmp_path}: .*The state of step 3 there is intact"
        ):
            fit(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    model, _ = fit(tmp_path)
    assert names(tmp_path) == ["step_00000003", "step_00000006"]


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_saves_says_where_and_stops(number, error, tmp_path, capsys):
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(error):
        fit(tmp_path, seed=1, more=[At(2, lambda model: os.kill(os.getpid(), number))])
    assert f"Saved after step 2 in {tmp_path / 'step_00000002'}" in capsys.readouterr().out
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    _, history = fit(tmp_path, seed=1)
    _, expected = fit(tmp_path / "straight", seed=1)
    assert history == expected


@pytest.fixture
def ctrl_c_interrupts():
    """As in a program of one's own; pytest-xdist's processes ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_second_signal_is_not_held_back(tmp_path, ctrl_c_interrupts):
    def twice(model):
        for _ in range(2):  # each in its turn: two that are pending at once count as one
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, more=[At(2, twice)])
    assert not tmp_path.exists() or names(tmp_path) == []


def test_state_json_is_for_people_too(tmp_path):
    fit(tmp_path, every=2, epochs=1)
    state = json.loads((tmp_path / "step_00000002" / "state.json").read_text())
    assert (state["step"], state["epoch"], state["batch"]) == (2, 0, 2)
    assert state["depends_on"]["optimizer.class_name"] == "AdamW" and state["logs"].keys() == {"loss"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(every=0), "every must be"),
        (dict(every="day"), "every must be"),
        (dict(keep=0), "keep must be"),
        (dict(mode="most"), "mode must be"),
        (dict(weights="frozen"), "weights must be"),
    ],
)
def test_bad_settings(settings, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        kq.callbacks.Checkpoint(tmp_path, **settings)
