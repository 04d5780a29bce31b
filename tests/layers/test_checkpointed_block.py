"""CheckpointedDecoderBlock under `fit` in a model of one's own: with and without XLA, dropout, mixed precision."""

import keras
import numpy as np
import pytest

from keras_qwen import QwenConfig
from keras_qwen.layers import CheckpointedDecoderBlock, DecoderBlock

CONFIG = QwenConfig(
    model_type="qwen3", vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, initializer_range=0.3, attention_dropout=0.5,
)  # fmt: skip
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(4, 6, 16)).astype("float32"), RNG.normal(size=(4, 6, 16)).astype("float32")


def trained(cls, dtype, jit_compile, config=CONFIG):
    inputs = keras.Input((None, 16))
    block = cls(config, dtype=dtype, name="block")
    model = keras.Model(inputs, keras.layers.Activation("linear", dtype="float32")(block(inputs)))
    rng = np.random.default_rng(1)
    for variable in block.trainable_variables:
        variable.assign((rng.normal(0, 0.3, variable.shape) + (len(variable.shape) == 1)).astype("float32"))
    if block.self_attn.seed_generator is not None:
        block.self_attn.seed_generator.state.assign([7, 0])
    model.compile(keras.optimizers.SGD(0.1), loss="mse", jit_compile=jit_compile)
    losses = model.fit(X, Y, batch_size=2, epochs=2, shuffle=False, verbose=0).history["loss"]
    return losses, [keras.ops.convert_to_numpy(v) for v in block.trainable_variables]


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("jit_compile", [True, False] if keras.backend.backend() == "tensorflow" else [True])
def test_recomputing_changes_nothing_dropout_included(dtype, jit_compile):
    losses, weights = trained(DecoderBlock, dtype, jit_compile)
    again_losses, again_weights = trained(CheckpointedDecoderBlock, dtype, jit_compile)
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    assert again_losses == pytest.approx(losses, rel=tolerance)
    for a, b in zip(again_weights, weights, strict=True):
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)


def test_dropout_is_really_on():
    with_dropout, _ = trained(CheckpointedDecoderBlock, "float32", "auto")
    without, _ = trained(CheckpointedDecoderBlock, "float32", "auto", CONFIG.replace(attention_dropout=0.0))
    assert with_dropout != pytest.approx(without, rel=1e-3)


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="reads JAX's own account of what is kept")
def test_only_the_input_is_kept():
    """Without weights to keep, what the backward pass holds of a block is its input, of 4 x 6 x 16 numbers."""
    import jax

    kept = {}
    for cls in (DecoderBlock, CheckpointedDecoderBlock):
        block = cls(CONFIG.replace(attention_dropout=0.0))
        block.build((None, None, 16))
        _, pull = jax.vjp(lambda x, block=block: block(x, training=True), X)
        shapes = [leaf.shape for leaf in jax.tree.leaves(pull) if hasattr(leaf, "shape")]
        kept[cls] = sum(np.prod(s) for s in shapes if s[:2] == (4, 6))
    assert kept[CheckpointedDecoderBlock] == X.size
    assert kept[DecoderBlock] > 5 * X.size


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="reads JAX's own account of what is kept")
@pytest.mark.parametrize("remat", [None, "attention", "mlp", "block"])
def test_mixed_precision_keeps_no_activation_in_float32(remat):
    """Neither of the intermediate size nor of the hidden size; the norms' roots have one number a token."""
    import jax

    config = CONFIG.replace(attention_dropout=0.0)
    block = CheckpointedDecoderBlock(config, remat=remat, dtype="mixed_bfloat16")
    block.build((None, None, 16))
    x = jax.numpy.asarray(X, "bfloat16")
    _, pull = jax.vjp(lambda x: block(x, training=True), x)
    kept = [leaf for leaf in jax.tree.leaves(pull) if hasattr(leaf, "shape") and leaf.shape[:2] == (4, 6)]
    assert any(leaf.dtype == "bfloat16" for leaf in kept)
    assert [leaf.shape for leaf in kept if leaf.dtype == "float32" and leaf.size >= x.size] == []


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="reads TensorFlow's graph")
def test_mixed_precision_makes_no_float32_of_the_intermediate_size():
    import tensorflow as tf

    block = DecoderBlock(CONFIG.replace(attention_dropout=0.0), dtype="mixed_bfloat16")
    block.build((None, None, 16))

    @tf.function(autograph=False)
    def gradients(x):
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(tf.cast(block(x, training=True), "float32"))
        return tape.gradient(total, [v.value for v in block.trainable_variables])

    graph = gradients.get_concrete_function(tf.constant(X)).graph
    tensors = [output for operation in graph.get_operations() for output in operation.outputs]
    wide = [t for t in tensors if t.shape.rank == 3 and t.shape.as_list() == [4, 6, 24]]
    assert wide and {t.dtype for t in wide} == {tf.bfloat16}


def test_config_says_what_is_recomputed():
    assert CheckpointedDecoderBlock(CONFIG).remat == "block"
    block = CheckpointedDecoderBlock(CONFIG, remat="mlp")
    assert CheckpointedDecoderBlock.from_config(block.get_config()).remat == "mlp"
    with pytest.raises(ValueError, match="remat='all' is not known to a block"):
        CheckpointedDecoderBlock(CONFIG, remat="all")
