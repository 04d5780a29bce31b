"""Fails loudly when Keras changes what `keras_private.py` relies on."""

import random

import keras
import numpy as np
import pytest

from keras_qwen import keras_private
from keras_qwen.backend import concrete_value


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


def adamw(cls, **settings):
    variable = keras.Variable(np.ones(3, "float32"), name="weight")
    optimizer = cls(0.1, **settings)
    optimizer.build([variable])
    return optimizer, variable


@pytest.mark.skipif(keras.backend.backend() == "torch", reason="there Keras updates all variables in one call")
def test_replaced_update_takes_the_place_of_step_and_decay():
    optimizer, variable = adamw(keras.optimizers.AdamW, weight_decay=0.5)
    seen = []
    with keras_private.replaced_update(optimizer, lambda *arguments: seen.append(arguments)):
        optimizer.apply([keras.ops.ones(3)], [variable])
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), np.ones(3))
    assert len(seen) == 1 and int(optimizer.iterations) == 1
    optimizer.apply([keras.ops.ones(3)], [variable])  # Keras's own again: decay of 0.5 * 0.1, and about 0.1
    np.testing.assert_allclose(keras.ops.convert_to_numpy(variable), np.full(3, 0.85), atol=0.06)


def test_own_update_turns_the_decay_off():
    for decays, expected in ((False, 0.95), (True, 1.0)):
        optimizer, variable = adamw(keras_private.OwnUpdate, weight_decay=0.5)
        optimizer.decays_in_update = decays
        optimizer.update_step = lambda *arguments: None
        optimizer.apply([keras.ops.ones(3)], [variable])
        np.testing.assert_allclose(keras.ops.convert_to_numpy(variable), np.full(3, expected), rtol=1e-6)


def test_moments_index_and_decay_of_a_variable():
    optimizer, variable = adamw(keras.optimizers.AdamW, weight_decay=0.5)
    first, second = keras_private.adam_moments(optimizer, variable)
    assert "momentum" in first.path and "velocity" in second.path
    assert keras_private.variable_index(optimizer, variable) == 0
    assert keras_private.weight_decay(optimizer, variable) == 0.5
    optimizer, variable = adamw(keras.optimizers.Adam)
    assert keras_private.weight_decay(optimizer, variable) == 0.0


def test_abstract_variables_never_get_a_value():
    def forbidden(shape, dtype=None):
        raise AssertionError("initialised")

    with keras_private.abstract_variables():
        layer = small_layer()
        keras_private.set_initializer(layer.kernel, forbidden)
        assert tuple(layer.kernel.shape) == (2, 3)
    with keras_private.deferred_initialization():
        pass  # nothing left over from before


def test_global_seed_state_is_what_unseeded_numbers_come_from():
    keras.random.uniform((2,))
    state = keras_private.global_seed_state()
    kept = keras.ops.convert_to_numpy(state.value)
    first = keras.ops.convert_to_numpy(keras.random.uniform((5,)))
    state.assign(kept)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(keras.random.uniform((5,))), first)


def test_fit_takes_a_data_adapter_as_it_is():
    class Batches(keras_private.DataAdapter):
        num_batches, batch_size, has_partial_batch, partial_batch_size = 2, 3, False, None

        def get_numpy_iterator(self):
            yield from [(np.ones((3, 1), "float32"), np.full((3, 1), number, "float32")) for number in (2, 4)]

        get_jax_iterator = get_numpy_iterator

        def get_tf_dataset(self):
            import tensorflow as tf

            return tf.data.Dataset.from_generator(
                self.get_numpy_iterator, output_signature=(tf.TensorSpec((3, 1)), tf.TensorSpec((3, 1)))
            )

        def get_torch_dataloader(self):
            return self.get_numpy_iterator()

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile(loss="mse")
    assert model.evaluate(Batches(), verbose=0) == 10.0


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="only there does Keras compile initialisers")
def test_on_a_mesh_an_initialiser_gets_the_sharding_and_is_not_traced(monkeypatch):
    from keras.src.backend.jax import core

    monkeypatch.setattr(core, "should_shard_at_init", lambda *_: True)  # as for a large variable
    found = []

    def initializer(shape, dtype=None, sharding=None):
        found.append((sharding, concrete_value(keras.ops.ones(()))))
        return keras.ops.full(shape, 7.0, dtype)

    mesh = keras.distribution.DeviceMesh((1,), ("data",), keras.distribution.list_devices()[:1])
    with keras.distribution.DataParallel(device_mesh=mesh).scope(), keras_private.deferred_initialization():
        layer = small_layer()
        keras_private.set_initializer(layer.kernel, initializer)
    [(sharding, one)] = found
    assert one == 1.0  # a traced initialiser would not know
    assert sharding == keras_private.sharding_of(layer.kernel)
    assert layer.kernel.value.sharding.is_equivalent_to(sharding, 2)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(layer.kernel), np.full((2, 3), 7.0))


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="values are let go of on JAX only")
def test_a_released_variable_takes_another_value():
    variable = keras.Variable(np.ones((2, 3), "float32"))
    keras_private.release(variable)
    variable.assign(np.full((2, 3), 5.0, "float32"))
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), np.full((2, 3), 5.0))
    assert keras_private.sharding_of(variable) is None


def test_a_data_adapter_gives_the_batches_of_fit():
    x = np.arange(10.0).reshape(5, 2)
    adapter = keras_private.data_adapter({"a": x}, x[:, 0], None, 2, None, False, None)
    assert (adapter.num_batches, adapter.batch_size, adapter.partial_batch_size) == (3, 2, 1)
    inputs, labels = next(iter(adapter.get_numpy_iterator()))
    np.testing.assert_array_equal(inputs["a"], x[:2])
    np.testing.assert_array_equal(labels, x[:2, 0])


def test_whether_a_seed_was_set_is_known(monkeypatch):
    assert not keras_private.is_seeded()
    state = random.getstate(), np.random.get_state()
    monkeypatch.setattr(
        "keras.src.utils.rng_utils.tf", type("NoTensorFlow", (), {"available": False})
    )  # slow to import
    keras.utils.set_random_seed(1)
    assert keras_private.is_seeded()
    random.setstate(state[0]), np.random.set_state(state[1])
