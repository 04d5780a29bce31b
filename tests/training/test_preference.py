"""DPO through `fit`, held against its formula in numpy."""

import keras
import numpy as np
import pytest

import keras_qwen as kq
from keras_qwen.training import DPO

SIZES = dict(
    model_type="qwen3", vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, initializer_range=0.3, tie_word_embeddings=True,
)  # fmt: skip
ROWS = np.random.default_rng(0).integers(0, 61, (8, 11)).astype("int32")
IDS, LABELS = ROWS[:, :-1], ROWS[:, 1:]
WEIGHTS = (np.arange(10) >= np.array([3, 3, 5, 5, 2, 2, 7, 7])[:, None]).astype("float32")


def adapted(seed=1):
    model = kq.QwenCausalLM(kq.QwenConfig(**SIZES), dtype="float32")
    model.enable_lora(3)
    rng = np.random.default_rng(seed)
    for variable in model.trainable_variables:  # an adapter that changes something
        variable.assign(0.2 * rng.standard_normal(variable.shape))
    return model


def losses_of(policy, reference, beta, smoothing):
    """Equation 7 of the paper, and label smoothing, from sums of log-probabilities (rows,)."""
    gains = policy - reference
    margins = beta * (gains[::2] - gains[1::2])
    log_sigmoid = lambda x: -np.logaddexp(0.0, -x)  # noqa: E731
    return -(1 - smoothing) * log_sigmoid(margins) - smoothing * log_sigmoid(-margins), margins


def answer_log_probs(model):
    return (model.score({"token_ids": IDS}, LABELS) * WEIGHTS).sum(axis=1)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("micro_batch_size", [None, 2])
def test_loss_and_accuracy_are_those_of_the_formula(smoothing, micro_batch_size):
    model = adapted()
    policy = answer_log_probs(model)
    with model.disable_adapter():
        reference = answer_log_probs(model)
    assert np.abs(policy - reference).max() > 0.1
    expected, margins = losses_of(policy, reference, 0.5, smoothing)
    model.compile("sgd", loss=DPO(0.5, smoothing), micro_batch_size=micro_batch_size)
    found = model.evaluate({"token_ids": IDS}, LABELS, sample_weight=WEIGHTS, batch_size=4, verbose=0, return_dict=True)
    np.testing.assert_allclose(found["loss"], expected.mean(), rtol=1e-5)
    assert found["reward_accuracy"] == pytest.approx((margins > 0).mean())
    given = {"token_ids": IDS, "reference_log_probs": reference}
    found = model.evaluate(given, LABELS, sample_weight=WEIGHTS, batch_size=4, verbose=0, return_dict=True)
    np.testing.assert_allclose(found["loss"], expected.mean(), rtol=1e-5)


@pytest.mark.parametrize("micro_batch_size", [None, 2])
def test_a_step_is_the_gradient_of_the_formula(micro_batch_size):
    """By differences: the loss after small steps along one adapter matrix."""
    model = adapted()
    variable = model.trainable_variables[1]
    direction = np.random.default_rng(5).standard_normal(variable.shape).astype("float32")
    start = keras.ops.convert_to_numpy(variable)
    with model.disable_adapter():
        reference = answer_log_probs(model)

    def loss_at(step):
        variable.assign(start + step * direction)
        return losses_of(answer_log_probs(model).astype("float64"), reference, 0.5, 0.0)[0].mean()

    slope = (loss_at(1e-2) - loss_at(-1e-2)) / 2e-2
    variable.assign(start)
    model.compile(keras.optimizers.SGD(1.0), loss=DPO(0.5), micro_batch_size=micro_batch_size)
    history = model.fit({"token_ids": IDS}, LABELS, sample_weight=WEIGHTS, batch_size=8, shuffle=False, verbose=0)
    gradient = start - keras.ops.convert_to_numpy(variable)
    np.testing.assert_allclose((gradient * direction).sum(), slope, rtol=2e-2)
    assert history.history["gradient_norm"][0] > 0


def test_training_orders_the_pairs():
    model = adapted()
    model.compile(kq.training.AdamW(0.02), loss=DPO(0.5))
    arguments = dict(sample_weight=WEIGHTS, batch_size=8, epochs=12, shuffle=False, verbose=0)
    history = model.fit({"token_ids": IDS}, LABELS, **arguments).history
    assert history["reward_accuracy"][-1] == pytest.approx(1.0)
    assert history["loss"][-1] < 0.3 * history["loss"][0]


def test_whole_models_train_with_given_references():
    model = kq.QwenCausalLM(kq.QwenConfig(**SIZES), dtype="float32")
    reference = answer_log_probs(model)
    model.compile(keras.optimizers.SGD(0.5), loss=DPO(0.5), micro_batch_size=4)
    given = {"token_ids": IDS, "reference_log_probs": reference}
    history = model.fit(given, LABELS, sample_weight=WEIGHTS, batch_size=8, epochs=4, shuffle=False, verbose=0).history
    assert history["loss"][0] == pytest.approx(np.log(2), rel=1e-5)  # nothing differs from the reference yet
    assert history["loss"][-1] < 0.6


def test_bad_input():
    model = kq.QwenCausalLM(kq.QwenConfig(**SIZES), dtype="float32")
    with pytest.raises(ValueError, match="micro_batch_size=3 would part a pair"):
        model.compile("sgd", loss=DPO(), micro_batch_size=3)
    model.compile("sgd", loss=DPO())
    with pytest.raises(ValueError, match="enable_lora"):
        model.train_on_batch({"token_ids": IDS}, LABELS, WEIGHTS)
    model.enable_lora(2)
    model.compile("sgd", loss=DPO())
    with pytest.raises(ValueError, match="3 rows does not consist of pairs"):
        model.train_on_batch({"token_ids": IDS[:3]}, LABELS[:3], WEIGHTS[:3])
    with pytest.raises(ValueError, match="shuffle=False"):
        model.fit({"token_ids": IDS}, LABELS, sample_weight=WEIGHTS)
    for settings, words in (({"beta": 0.0}, "beta"), ({"label_smoothing": 0.5}, "label_smoothing")):
        with pytest.raises(ValueError, match=words):
            DPO(**settings)


def test_a_saved_model_goes_on_with_its_loss(tmp_path):
    model = adapted()
    model.compile("sgd", loss=DPO(0.3), micro_batch_size=2)
    expected = model.evaluate({"token_ids": IDS}, LABELS, sample_weight=WEIGHTS, batch_size=8, verbose=0)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    found = again.evaluate({"token_ids": IDS}, LABELS, sample_weight=WEIGHTS, batch_size=8, verbose=0)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
