"""Tensors filled in place, and values that are or are not known."""

import keras
import ml_dtypes
import numpy as np
import pytest

from keras_qwen.backend import concrete_value, filled


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32"])
@pytest.mark.parametrize("shape", [(3, 5), (), (0, 4), (2, 3, 4)])
def test_filled_holds_what_was_written(dtype, shape):
    numpy_dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(numpy_dtype)
    seen = []

    def fill(parts):
        [(index, array)] = parts
        assert index == tuple(slice(0, size) for size in shape)
        seen.append((array.shape, array.dtype))
        array[...] = values

    tensor = filled(shape, dtype, fill)
    assert keras.backend.standardize_dtype(tensor.dtype) == dtype
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(keras.ops.cast(tensor, "float32")), values)
    assert seen in ([(shape, np.dtype(numpy_dtype))], []) and (seen or 0 in shape)


def test_a_filled_variable_can_be_updated():
    variable = keras.Variable(
        lambda shape, dtype: filled(shape, dtype, lambda parts: parts[0][1].fill(2.0)), shape=(100,), dtype="float32"
    )
    for step in range(3):
        variable.assign_add(keras.ops.ones(100))
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), np.full(100, 3.0 + step))


def test_values_are_known_of_eager_tensors_only():
    np.testing.assert_array_equal(concrete_value(keras.ops.array([1, 2])), [1, 2])
    assert concrete_value(keras.KerasTensor((2,))) is None
    seen = []

    class Probe(keras.layers.Layer):
        def call(self, x):
            seen.append(concrete_value(x))
            return x

    model = keras.Sequential([keras.Input((2,)), Probe()])
    seen.clear()
    model.predict(np.ones((1, 2), "float32"), verbose=0)
    assert seen == [None]
