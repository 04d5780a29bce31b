"""Each layer alone: values against numpy, and the routine that all must pass."""

import keras
import numpy as np
import pytest

from keras_qwen import QwenConfig
from keras_qwen.layers.decoder_block import CheckpointedDecoderBlock, DecoderBlock
from keras_qwen.layers.grouped_query_attention import GroupedQueryAttention
from keras_qwen.layers.rms_norm import RMSNorm
from keras_qwen.layers.swiglu_mlp import SwiGLUMLP
from keras_qwen.layers.token_embedding import TokenEmbedding

from .routine import check_layer, numpy

CONFIG = QwenConfig(
    model_type="qwen3", vocab_size=50, hidden_size=24, intermediate_size=40, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, initializer_range=0.3,
)  # fmt: skip
HIDDEN = np.random.default_rng(1).normal(size=(2, 7, 24)).astype("float32")


@pytest.mark.parametrize(
    "make",
    [
        lambda **k: RMSNorm(eps=1e-5, name="norm", **k),
        lambda **k: SwiGLUMLP(40, name="mlp", **k),
        lambda **k: GroupedQueryAttention(
            4, 2, 8, attention_bias=True, output_bias=True, qk_norm=True, name="attn", **k
        ),
        lambda **k: GroupedQueryAttention(4, sliding_window=3, rope_theta=100.0, name="attn", **k),
        lambda **k: DecoderBlock(CONFIG, name="block", **k),
        lambda **k: CheckpointedDecoderBlock(CONFIG, remat="mlp", name="block", **k),
    ],
)
def test_every_layer_passes_the_routine(make):
    check_layer(make, HIDDEN)


def test_token_embedding_passes_the_routine():
    ids = np.array([[1, 49, 0], [7, 7, 7]], "int32")
    make = lambda **k: TokenEmbedding(50, 24, name="embed", **k)  # noqa: E731
    check_layer(make, ids)
    check_layer(make, ids, call=lambda layer, x: layer(layer(x), reverse=True))


def test_rms_norm_values():
    layer = RMSNorm(eps=1e-2)
    layer.build(HIDDEN.shape)
    scale = np.linspace(-1, 2, 24).astype("float32")
    layer.scale.assign(scale)
    expected = HIDDEN / np.sqrt((HIDDEN.astype("float64") ** 2).mean(-1, keepdims=True) + 1e-2) * scale
    np.testing.assert_allclose(numpy(layer(HIDDEN)), expected, rtol=1e-5, atol=1e-6)


def test_rms_norm_is_float32_inside():
    """Squares of 300 overflow float16, and their sum of 24 loses bits in bfloat16."""
    layer = RMSNorm(eps=1e-6, dtype="mixed_float16")
    np.testing.assert_allclose(numpy(layer(np.full((1, 24), 300.0, "float32"))), np.ones((1, 24)), rtol=1e-3)


def test_swiglu_values():
    layer = SwiGLUMLP(40)
    out = numpy(layer(HIDDEN))
    gate, up, down = (numpy(p.kernel).astype("float64") for p in (layer.gate_proj, layer.up_proj, layer.down_proj))
    gated = HIDDEN @ gate
    np.testing.assert_allclose(out, (gated / (1 + np.exp(-gated)) * (HIDDEN @ up)) @ down, atol=1e-5)


def test_kernels_of_one_layer_are_drawn_apart():
    mlp = SwiGLUMLP(40)
    mlp.build((None, None, 24))
    assert not np.array_equal(numpy(mlp.gate_proj.kernel), numpy(mlp.up_proj.kernel))
    block = DecoderBlock(CONFIG)
    block.build((None, None, 24))
    assert not np.array_equal(numpy(block.self_attn.k_proj.kernel), numpy(block.self_attn.v_proj.kernel))


def test_keras_mask_and_segment_ids_mean_the_same():
    layer = GroupedQueryAttention(4, 2)
    mask = np.array([[1, 1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1, 1]], bool)
    masked, segmented = numpy(layer(HIDDEN, mask=mask)), numpy(layer(HIDDEN, segment_ids=mask.astype("int32")))
    np.testing.assert_array_equal(masked, segmented)
    short = numpy(layer(HIDDEN[1:, 2:]))
    np.testing.assert_allclose(masked[1:, 2:], short, atol=1e-5)


def test_keras_mask_reaches_a_layer_through_an_embedding():
    ids = np.array([[5, 6, 7, 0, 0]], "int32")
    inputs = keras.Input((None,), dtype="int32")
    embed = keras.layers.Embedding(10, 24, mask_zero=True)
    layer = GroupedQueryAttention(4, 2)
    with pytest.MonkeyPatch.context():
        model = keras.Model(inputs, layer(embed(inputs)))
    whole, alone = model.predict(ids, verbose=0), model.predict(ids[:, :3], verbose=0)
    np.testing.assert_allclose(whole[:, :3], alone, atol=1e-5)
    changed = ids.copy()
    embed.embeddings.assign(keras.ops.concatenate([embed.embeddings[:1] + 9.0, embed.embeddings[1:]]))
    np.testing.assert_allclose(model.predict(changed, verbose=0)[:, :3], alone, atol=1e-5)


def test_sliding_window_forgets():
    layer = GroupedQueryAttention(4, 2, sliding_window=3)
    before = numpy(layer(HIDDEN))
    changed = HIDDEN.copy()
    changed[:, 1] += 1.0
    after = numpy(layer(changed))
    assert np.abs(after - before)[:, 1:4].min(-1).min() >= 0 and np.abs(after - before)[:, 1:4].max(-1).min() > 1e-4
    np.testing.assert_allclose(after[:, 4:], before[:, 4:], atol=1e-6)
    np.testing.assert_allclose(after[:, :1], before[:, :1], atol=1e-6)


def test_head_counts_that_do_not_divide():
    with pytest.raises(ValueError, match="num_attention_heads 6 is no multiple of num_key_value_heads 4"):
        GroupedQueryAttention(6, 4)
    with pytest.raises(ValueError, match="hidden_size 24 is no multiple of num_attention_heads 5"):
        GroupedQueryAttention(5).build((None, None, 24))


def test_blocks_make_what_they_are_not_given():
    from keras_qwen.layers.rotary_embedding import RotaryEmbedding

    block = DecoderBlock(CONFIG)
    rope = RotaryEmbedding(8, rope_parameters=dict(CONFIG.rope_parameters))(np.arange(7)[None])
    mask = np.tril(np.ones((1, 7, 7), bool))
    np.testing.assert_allclose(numpy(block(HIDDEN)), numpy(block(HIDDEN, rope=rope, attention_mask=mask)), atol=1e-5)


def test_cache_gives_what_the_whole_row_gives():
    block = DecoderBlock(CONFIG)
    whole = numpy(block(HIDDEN))
    from keras_qwen.layers.rotary_embedding import RotaryEmbedding

    rotary = RotaryEmbedding(8, rope_parameters=dict(CONFIG.rope_parameters))
    empty = keras.ops.zeros((2, 2, 9, 8))
    out, cache = block(HIDDEN[:, :4], rope=rotary(np.arange(4)[None]), cache=(empty, empty), cache_index=0)
    outs = [numpy(out)]
    for i in range(4, 7):
        sees = (np.arange(9) <= i)[None, None]
        rope = rotary(np.array([[i]]))
        out, cache = block(HIDDEN[:, i : i + 1], rope=rope, attention_mask=sees, cache=cache, cache_index=i)
        outs.append(numpy(out))
    np.testing.assert_allclose(np.concatenate(outs, 1), whole, atol=1e-5)
