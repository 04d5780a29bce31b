"""QuantizedProjection, its policy, and how layers come to have one."""

import keras
import numpy as np
import pytest

from keras_qwen import QwenConfig
from keras_qwen.layers import DecoderBlock, SwiGLUMLP
from keras_qwen.layers.projection import Projection
from keras_qwen.layers.quantized_policy import QuantizedBasePolicy, quantization_of
from keras_qwen.layers.quantized_projection import QuantizedProjection
from keras_qwen.ops.quantization import KINDS, Quantized, quantize

RNG = np.random.default_rng(0)


def numpy(x):
    return keras.ops.convert_to_numpy(keras.ops.cast(x, "float32"))


def projection(kind, inputs=70, units=33, name="float32", variable_dtype="bfloat16", use_bias=True):
    layer = QuantizedProjection(units, use_bias=use_bias, dtype=QuantizedBasePolicy(kind, name, variable_dtype))
    layer.build((None, inputs))
    kernel = RNG.normal(size=(inputs, units)).astype("float32")
    parts = quantize(Quantized(kind, inputs, units), lambda start, stop: kernel[:, start:stop])
    for part, value in parts.items():
        layer.parts[part].assign(value)
    return layer, kernel


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["float32", "mixed_bfloat16", "bfloat16"])
def test_it_is_a_dense_layer_with_the_dequantised_kernel(kind, name):
    layer, kernel = projection(kind, name=name)
    layer.bias.assign(np.arange(33) / 8)
    full = numpy(layer.full_kernel())
    assert keras.backend.standardize_dtype(layer.full_kernel().dtype) == "float32"
    assert 0 < np.abs(full - kernel).max() < 0.5
    dense = keras.layers.Dense(33, dtype=name)
    dense.build((None, 70))
    dense.kernel.assign(full)
    dense.bias.assign(np.arange(33) / 8)
    x = RNG.normal(size=(2, 5, 70)).astype("float32")
    found, expected = layer(x), dense(x)
    assert found.dtype == expected.dtype
    tolerance = dict(rtol=1e-5, atol=1e-5) if name == "float32" else dict(rtol=0.02, atol=0.1)
    np.testing.assert_allclose(numpy(found), numpy(expected), **tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_its_variables(kind):
    layer, _ = projection(kind)
    parts = Quantized(kind, 70, 33).parts
    assert sorted(v.name for v in layer.variables) == sorted([*(f"kernel_{name}" for name in parts), "bias"])
    assert [keras.backend.standardize_dtype(layer.parts[n].dtype) for n in parts] == [p.dtype for p in parts.values()]
    assert [v.name for v in layer.trainable_variables] == ["bias"] and layer.bias.dtype == "bfloat16"
    layer.trainable = False
    layer.trainable = True
    assert [v.name for v in layer.trainable_variables] == ["bias"]


def test_it_takes_no_full_kernel_and_is_quantised_once():
    layer, kernel = projection("nf4")
    with pytest.raises(ValueError, match=r"quantised \(nf4\) and cannot take full weights: model.dequantize\(\)"):
        layer.replace_kernel(kernel)
    with pytest.raises(ValueError, match=r"quantised \(nf4\) already"):
        layer.quantize("int8")


def test_the_policy_decides_what_layers_are_made_of():
    policy = QuantizedBasePolicy("int4", "mixed_bfloat16", "bfloat16")
    config = QwenConfig(
        vocab_size=10, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    block = DecoderBlock(config, dtype=policy)
    block.build((None, None, 64))
    kinds = {layer.name: type(layer) for layer in block._flatten_layers() if layer.name.endswith("_proj")}
    assert kinds == dict.fromkeys(
        "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split(), QuantizedProjection
    )
    assert block.input_layernorm.scale.dtype == "bfloat16"
    assert block(np.ones((1, 3, 64), "float32")).dtype == keras.ops.ones((), "bfloat16").dtype
    mlp = SwiGLUMLP(96)
    mlp.build((None, 64))
    assert type(mlp.up_proj) is Projection


def test_the_policy_is_a_value():
    policy = QuantizedBasePolicy("nf4", "mixed_float16", "bfloat16")
    assert (policy.name, policy.compute_dtype, policy.variable_dtype) == ("mixed_float16", "float16", "bfloat16")
    again = keras.dtype_policies.deserialize(keras.dtype_policies.serialize(policy))
    assert again == policy and hash(again) == hash(policy) and "nf4" in repr(policy)
    assert policy != QuantizedBasePolicy("int4", "mixed_float16", "bfloat16")
    assert policy != keras.dtype_policies.DTypePolicy("mixed_float16")
    assert keras.dtype_policies.DTypePolicy("mixed_float16") != policy
    assert quantization_of(policy) == "nf4" and quantization_of(keras.dtype_policies.DTypePolicy("float32")) is None
    with pytest.raises(ValueError, match="known are 'int8'"):
        QuantizedBasePolicy("int3")
