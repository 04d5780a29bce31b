"""Fails loudly when Keras changes what `keras_private.py` relies on."""

import keras
import numpy as np
import pytest

from keras_qwen import keras_private


def small_layer():
    layer = keras.layers.Dense(3, name="dense")
    layer.build((None, 2))
    return layer


def test_initialisation_is_deferred_and_can_be_replaced():
    calls = []

    def initializer(shape, dtype=None):
        calls.append((tuple(shape), dtype))
        return keras.ops.full(shape, 7.0, dtype)

    with keras_private.deferred_initialization():
        layer = small_layer()
        keras_private.set_initializer(layer.kernel, initializer)
        assert calls == []
    assert calls == [((2, 3), "float32")]
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(layer.kernel), np.full((2, 3), 7.0))
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(layer.bias), np.zeros(3))


def test_an_error_inside_drops_the_variables():
    def forbidden(shape, dtype=None):
        raise AssertionError("initialised although the body had failed")

    with pytest.raises(KeyError, match="stop"), keras_private.deferred_initialization():
        keras_private.set_initializer(small_layer().kernel, forbidden)
        raise KeyError("stop")
    with keras_private.deferred_initialization():
        pass  # nothing left over from before


def test_set_initializer_refuses_an_initialised_variable():
    with pytest.raises(RuntimeError, match="initialised already"):
        keras_private.set_initializer(small_layer().kernel, keras.initializers.Zeros())


def test_loss_tracker_is_what_fit_reports():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", loss="mse")
    tracker = keras_private.loss_tracker(model)
    tracker.update_state(5.0, sample_weight=2.0)
    tracker.update_state(2.0, sample_weight=1.0)
    assert float(model.get_metrics_result()["loss"]) == pytest.approx(4.0)
