"""Fails loudly when Keras changes what `keras_private_tensorflow.py` relies on."""

import keras
import numpy as np
import pytest

if keras.backend.backend() != "tensorflow":
    pytest.skip("TensorFlow's own", allow_module_level=True)

import tensorflow as tf
from keras.src.backend.tensorflow.core import Variable
from keras.src.backend.tensorflow.optimizer import TFOptimizer

from keras_qwen import keras_private_tensorflow as private


def test_every_method_of_tensorflow_is_known():
    own = {name for name, value in vars(TFOptimizer).items() if callable(value) and not name.startswith("__")}
    assert own == {
        *private._OF_TENSORFLOW,
        "stateless_apply",
        "_all_reduce_sum_gradients",
        "_distributed_tf_update_step",
    }


def test_variables_are_made_by_the_function_given(monkeypatch):
    monkeypatch.setattr(Variable, "_initialize", Variable._initialize)
    seen = []

    def make(variable, value):
        seen.append(variable.name)
        return tf.Variable(value() + 1.0) if variable.name == "mine" else None

    private.initialize_variables(make)
    mine = keras.Variable(initializer="zeros", shape=(2,), name="mine")
    other = keras.Variable(initializer="zeros", shape=(2,), name="other")
    assert seen == ["mine", "other"]
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(mine), [1.0, 1.0])
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(other), [0.0, 0.0])


def test_assignments_wait_and_are_seen_inside():
    variable = keras.Variable([1.0, 2.0])
    with private.deferred_assignments():
        variable.assign_add([1.0, 1.0])
        variable.assign_add([1.0, 1.0])
        np.testing.assert_array_equal(variable.value, [3.0, 4.0])
        np.testing.assert_array_equal(variable._value, [1.0, 2.0])
    np.testing.assert_array_equal(variable._value, [3.0, 4.0])


@pytest.mark.parametrize("make", [keras.optimizers.AdamW, keras.optimizers.Nadam, keras.optimizers.SGD])
def test_deferred_updates_are_those_of_tensorflow(make):
    def trained(context):
        variable = keras.Variable([1.0, 2.0])
        optimizer = make(0.1)
        optimizer.build([variable])
        for step in (1.0, 2.0, 3.0):
            with context():
                optimizer.apply_gradients([(tf.constant([step, -step]), variable)])
        return keras.ops.convert_to_numpy(variable)

    np.testing.assert_allclose(trained(private.deferred_assignments), trained(lambda: tf.name_scope("x")), rtol=1e-6)


def test_gradients_are_recorded_and_nothing_updated():
    variable = keras.Variable([1.0])
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build([variable])
    with private.recorded_gradients(optimizer) as gradients:
        optimizer.apply_gradients([(tf.constant([5.0]), variable)])
    assert [g.numpy().tolist() for g in gradients] == [[5.0]]
    np.testing.assert_array_equal(variable._value, [1.0])
    optimizer.apply_gradients([(tf.constant([5.0]), variable)])
    np.testing.assert_allclose(variable._value, [0.5])


def test_gradients_that_are_summed_already_are_not_summed_again():
    optimizer = keras.optimizers.SGD(0.1)
    with private.summed_gradients(optimizer):
        assert optimizer._all_reduce_sum_gradients([(1, 2)]) == [(1, 2)]
    assert "_all_reduce_sum_gradients" not in vars(optimizer)


def test_metrics_are_made_before_the_step():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", loss="mse", metrics=["mae"])
    private.build_metrics(model, (tf.ones((3, 2)), tf.ones((3, 1))))
    assert "mae" in [metric.name for metric in model.metrics[1].metrics]
