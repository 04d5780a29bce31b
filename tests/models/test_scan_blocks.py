"""scan_blocks: the same numbers, one compiled block."""

import keras
import numpy as np
import pytest

from keras_qwen import QwenBackbone, QwenCausalLM, QwenConfig

SIZES = dict(
    model_type="qwen3", vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, initializer_range=0.3, max_position_embeddings=64,
    tie_word_embeddings=True,
)  # fmt: skip
CONFIG = QwenConfig(**SIZES)
ROWS = np.random.default_rng(0).integers(0, 61, (4, 10)).astype("int32")
INPUTS = {"token_ids": ROWS[:, :-1], "segment_ids": np.array([[1] * 4 + [2] * 3 + [0] * 2] * 4)}

only_jax = pytest.mark.skipif(keras.backend.backend() != "jax", reason="scan_blocks is there on JAX alone")


def pair(**arguments):
    """Two models of the same weights, the second with scan_blocks."""
    models = [QwenCausalLM(CONFIG, scan_blocks=scan, **arguments) for scan in (False, True)]
    models[1].set_weights(models[0].get_weights())
    return models


@only_jax
@pytest.mark.parametrize(("dtype", "remat"), [("float32", None), ("float32", "block"), ("mixed_bfloat16", "mlp")])
def test_same_logits_and_training(dtype, remat):
    models = pair(dtype=dtype, remat=remat)
    plain, scanned = models
    assert [v.path for v in plain.variables] == [v.path for v in scanned.variables]
    # Rounding to bfloat16 falls differently where XLA fuses differently.
    tolerance = 1e-5 if dtype == "float32" else 0.15
    expected, logits = (model.predict(INPUTS, verbose=0).astype("float32") for model in models)
    np.testing.assert_allclose(logits, expected, atol=tolerance)
    histories = []
    for model in models:
        model.compile(keras.optimizers.SGD(0.1), micro_batch_size=2)
        history = model.fit(INPUTS, ROWS[:, 1:], batch_size=4, epochs=3, shuffle=False, verbose=0).history
        histories.append(history["loss"])
    assert histories[0][-1] < histories[0][0]
    np.testing.assert_allclose(histories[1], histories[0], rtol=1e-5 if dtype == "float32" else 1e-2)
    if dtype == "float32":
        for a, b in zip(plain.get_weights(), scanned.get_weights(), strict=True):
            np.testing.assert_allclose(b, a, atol=1e-5)


@only_jax
def test_one_block_is_traced_however_many_there_are():
    import jax

    def equations(layers):
        model = QwenCausalLM(QwenConfig(**SIZES | {"num_hidden_layers": layers}), dtype="float32", scan_blocks=True)

        def logits(values):
            with keras.StatelessScope(state_mapping=list(zip(model.variables, values, strict=True))):
                return model({"token_ids": ROWS})

        jaxpr = jax.make_jaxpr(logits)([v.value for v in model.variables]).jaxpr
        return sum(equation.primitive.name == "scan" for equation in jaxpr.eqns), len(str(jaxpr))

    (scans, small), (_, large) = equations(2), equations(16)
    assert scans == 1
    assert large < 2 * small


@only_jax
def test_may_be_set_on_a_built_model_and_is_kept_in_its_config():
    plain, scanned = pair(dtype="float32")
    logits = scanned.predict(INPUTS, verbose=0)
    assert QwenCausalLM.from_config(scanned.get_config()).scan_blocks
    assert not QwenCausalLM.from_config(plain.get_config()).scan_blocks
    plain.scan_blocks = True
    np.testing.assert_array_equal(plain.predict(INPUTS, verbose=0), logits)


@only_jax
@pytest.mark.parametrize(
    ("changes", "remat", "words"),
    [
        ({}, 2, "layers_1 differs from layers_0 in its remat"),
        ({"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}, None, "sliding window"),
        ({"attention_dropout": 0.1}, None, "dropout"),
    ],
)
def test_blocks_that_are_not_alike(changes, remat, words):
    model = QwenCausalLM(QwenConfig(**SIZES | changes), remat=remat, scan_blocks=True)
    with pytest.raises(ValueError, match=words):
        model(INPUTS)


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="JAX has it")
@pytest.mark.parametrize("kind", [QwenBackbone, QwenCausalLM])
def test_other_backends_say_that_they_have_none(kind):
    with pytest.raises(ValueError, match="scan_blocks is there on JAX alone, not on"):
        kind(CONFIG, scan_blocks=True)
