"""The count of operations against one made by hand, and against XLA's."""

import keras
import pytest

from keras_qwen import QwenCausalLM, QwenConfig
from keras_qwen.compute_estimate import flops_per_token, matrix_weights

CONFIG = QwenConfig(
    vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
WEIGHTS = 2 * (32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48) + 32 * 100


@pytest.mark.parametrize("tied", [False, True])
def test_weights_that_tokens_are_multiplied_with(tied):
    assert matrix_weights(CONFIG.replace(tie_word_embeddings=tied)) == WEIGHTS


def test_operations_of_a_token():
    attention = 2 * 4 * 32 * (9 + 1) / 2  # two layers; the keys that a token sees, in the mean
    assert flops_per_token(CONFIG, 9, training=False) == 2 * WEIGHTS + attention
    assert flops_per_token(CONFIG, 9) == 6 * WEIGHTS + 3 * attention
    assert flops_per_token(CONFIG, 9, trained_weights=0, adapter_weights=50) == 4 * WEIGHTS + 6 * 50 + 3 * attention
    assert flops_per_token(CONFIG, 9, trained_weights=40) == 4 * WEIGHTS + 2 * 40 + 3 * attention


def test_a_sliding_window_sees_fewer_keys():
    config = CONFIG.replace(use_sliding_window=True, sliding_window=3, max_window_layers=1, layer_types=None)
    keys = sum(t for t in range(1, 10)) / 9 + sum(min(t, 3) for t in range(1, 10)) / 9
    assert flops_per_token(config, 9, training=False) == pytest.approx(2 * WEIGHTS + 4 * 32 * keys)


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="XLA counts for JAX")
def test_xla_counts_about_as_many():
    import jax

    model = QwenCausalLM(CONFIG, dtype="float32", attention="dense")
    values = [v.value for v in model.non_trainable_variables]
    trainable = [v.value for v in model.trainable_variables]

    def forward(trainable, ids):
        return model.stateless_call(trainable, values, {"token_ids": ids})[0]

    cost = jax.jit(forward).lower(trainable, jax.numpy.zeros((2, 9), "int32")).compile().cost_analysis()
    cost = cost[0] if isinstance(cost, list) else cost
    dense = flops_per_token(CONFIG, 2 * 9 - 1, training=False)  # which computes all 9 keys for each token
    assert cost["flops"] / 18 == pytest.approx(dense, rel=0.15)
