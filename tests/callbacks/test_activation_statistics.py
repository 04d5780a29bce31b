"""Statistics of the hidden states against the model's own outputs."""

import keras
import numpy as np
import pytest

import keras_qwen as kq
from keras_qwen.callbacks.activation_statistics import block_statistics

from .small_model import CONFIG, INPUTS, LABELS, MASK, fresh


def numpy(x):
    return np.asarray(keras.ops.convert_to_numpy(x))


@pytest.mark.parametrize("window", [None, 3])
def test_statistics_are_of_what_the_layers_give_out(window):
    config = CONFIG.replace(use_sliding_window=True, sliding_window=window, max_window_layers=1) if window else CONFIG
    model = fresh(config=config)
    found = block_statistics(model, INPUTS)
    assert list(found) == ["embed_tokens", "layers_0", "layers_1", "norm"]
    hidden, real = numpy(model.backbone(INPUTS)), MASK.astype(bool)
    assert found["norm"]["rms"] == pytest.approx(np.sqrt(np.square(hidden[real]).mean()), rel=1e-5)
    assert found["norm"]["max"] == pytest.approx(np.abs(hidden[real]).max(), rel=1e-5)
    embedded = numpy(model.backbone.embed_tokens(INPUTS["token_ids"]))
    assert found["embed_tokens"]["rms"] == pytest.approx(np.sqrt(np.square(embedded[real]).mean()), rel=1e-5)


def test_saturated_is_the_share_of_gates_open_or_closed():
    model = fresh()
    kernel = model.blocks[1].mlp.gate_proj.kernel
    kernel.assign(np.zeros(kernel.shape))
    assert block_statistics(model, INPUTS)["layers_1"]["saturated"] == 0.0
    normed = np.full((1, 1, 16), 1e3)
    kernel.assign(np.concatenate([normed[0].T @ np.ones((1, 6)), np.zeros((16, 18))], axis=1))
    assert block_statistics(model, INPUTS)["layers_1"]["saturated"] == pytest.approx(0.25, abs=0.01)


def test_measured_every_n_steps_and_training_does_not_notice():
    straight, model = fresh(), fresh()
    arguments = dict(batch_size=2, epochs=2, shuffle=False, verbose=0)
    straight.fit(INPUTS, LABELS, **arguments)
    history = model.fit(INPUTS, LABELS, **arguments, callbacks=[kq.callbacks.ActivationStatistics(every=2)]).history
    for a, b in zip(model.get_weights(), straight.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    again, rows = fresh(), {name: x[:2] for name, x in INPUTS.items()}
    again.fit(INPUTS, LABELS, **arguments | dict(epochs=1))
    again.fit(rows, LABELS[:2], **arguments | dict(epochs=1))
    expected = block_statistics(again, rows)["layers_1"]  # before the fifth step
    assert history["activation_rms/layers_1"][1] == pytest.approx(expected["rms"], rel=1e-5)
    assert history["activation_max/layers_1"][1] == pytest.approx(expected["max"], rel=1e-5)


def test_a_loss_that_becomes_nan_names_where_the_numbers_were_largest():
    model = fresh(keras.optimizers.SGD(1e30))
    callback = kq.callbacks.ActivationStatistics(every=50)
    with pytest.warns(
        UserWarning, match="not finite in step 2. .* finite before step 1, the largest number 4.78, in layers_1"
    ):
        model.fit(INPUTS, LABELS, batch_size=2, verbose=0, callbacks=[callback])


def test_the_layer_of_the_first_nan_is_named():
    model = fresh()
    kernel = model.blocks[1].mlp.down_proj.kernel
    kernel.assign(np.full(kernel.shape, np.nan))
    with pytest.warns(UserWarning, match="Before step 1, layers_1 is the first layer to give out NaN"):
        model.fit(INPUTS, LABELS, batch_size=6, verbose=0, callbacks=[kq.callbacks.ActivationStatistics(every=50)])


def test_data_that_cannot_be_looked_at():
    batches = (batch for batch in [(INPUTS, LABELS)])
    with pytest.raises(ValueError, match="cannot look into a generator.*pass probe="):
        fresh().fit(batches, verbose=0, callbacks=[kq.callbacks.ActivationStatistics()])
    with pytest.raises(ValueError, match="every must be a positive number"):
        kq.callbacks.ActivationStatistics(every=0)
