"""What is asked of every layer of this package, in one routine."""

import json

import keras
import numpy as np

POLICIES = ("float32", "mixed_bfloat16", "bfloat16", "mixed_float16")


def numpy(x):
    return keras.ops.convert_to_numpy(keras.ops.cast(x, "float32"))


def check_layer(make, inputs, *, call=lambda layer, x: layer(x)):
    """Config round trip, functional use, `.keras`-style weights, and every dtype policy.

    Args:
        make: called with `dtype=`, makes the layer.
        inputs: array (batch, ...) the layer is called with.
        call: how it is called.
    """
    layer = make(dtype="float32")
    expected = numpy(call(layer, inputs))

    config = json.loads(json.dumps(layer.get_config()))  # what a file holds
    again = type(layer).from_config(config)
    call(again, inputs)
    again.set_weights(layer.get_weights())
    np.testing.assert_array_equal(numpy(call(again, inputs)), expected)
    assert [w.path.split("/", 1)[-1] for w in again.weights] == [w.path.split("/", 1)[-1] for w in layer.weights]

    symbolic = keras.Input(inputs.shape[1:], dtype=str(inputs.dtype))
    model = keras.Model(symbolic, call(layer, symbolic))
    assert model.output.shape[1:] == expected.shape[1:]
    np.testing.assert_allclose(model.predict(inputs, verbose=0), expected, atol=1e-5)

    for policy in POLICIES[1:]:
        half = make(dtype=policy)
        call(half, inputs)
        half.set_weights(layer.get_weights())
        output = call(half, inputs)
        assert keras.backend.standardize_dtype(output.dtype) == half.compute_dtype
        assert {w.dtype for w in half.weights} <= {half.variable_dtype}
        scale = np.abs(expected).max()
        np.testing.assert_allclose(numpy(output), expected, atol=0.03 * scale)
