"""score: log-probabilities of tokens, against the logits."""

import keras
import numpy as np
import pytest

from keras_qwen import QwenCausalLM, QwenConfig

IDS = np.random.default_rng(0).integers(0, 61, (5, 9)).astype("int32")


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def model(request):
    config = QwenConfig(
        model_type="qwen2", vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3, tie_word_embeddings=request.param,
    )  # fmt: skip
    return QwenCausalLM(config, dtype="float32")


def expected(model, inputs, labels):
    logits = keras.ops.convert_to_numpy(model(inputs)).astype("float64")
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return np.take_along_axis(log_probs, np.maximum(labels, 0)[..., None], -1)[..., 0]


@pytest.mark.parametrize("batch_size", [None, 2])
def test_scores_of_the_next_tokens(model, batch_size):
    scores = model.score({"token_ids": IDS}, batch_size=batch_size)
    assert scores.shape == IDS.shape and scores.dtype == np.float32
    following = np.roll(IDS, -1, axis=1)
    np.testing.assert_allclose(scores[:, :-1], expected(model, IDS, following)[:, :-1], atol=1e-5)
    np.testing.assert_array_equal(scores[:, -1], 0)


def test_scores_are_what_the_loss_is_made_of(model):
    labels = np.where(IDS % 3 == 0, -100, IDS)
    scores = model.score({"token_ids": IDS}, labels)
    np.testing.assert_array_equal(scores[labels < 0], 0)
    np.testing.assert_allclose(scores, np.where(labels < 0, 0, expected(model, IDS, labels)), atol=1e-5)
    model.compile(keras.optimizers.SGD(0.1))
    loss = model.evaluate({"token_ids": IDS}, labels, verbose=0, return_dict=True)["loss"]
    np.testing.assert_allclose(-scores.sum() / (labels >= 0).sum(), loss, rtol=1e-5)


def test_padding_and_documents_do_not_count(model):
    segments = np.array([[1, 1, 1, 1, 2, 2, 2, 0, 0]] * 5)
    scores = model.score({"token_ids": IDS, "segment_ids": segments})
    assert ((scores != 0) == np.array([1, 1, 1, 0, 1, 1, 0, 0, 0], bool)).all()
    alone = model.score({"token_ids": IDS[:, 4:7]})
    np.testing.assert_allclose(scores[:, 4:6], alone[:, :2], atol=1e-5)


def test_scores_follow_training_and_adapters(model):
    inputs = {"token_ids": IDS}
    before = model.score(inputs)
    model.enable_lora(4, alpha=8)
    np.testing.assert_array_equal(model.score(inputs), before)
    model.compile(keras.optimizers.Adam(0.05))
    model.fit(inputs, np.roll(IDS, -1, axis=1), epochs=3, verbose=0)
    assert model.score(inputs).sum() > before.sum() + 1
    with model.disable_adapter():
        np.testing.assert_allclose(model.score(inputs), before, atol=1e-5)


def test_wrong_shapes(model):
    with pytest.raises(ValueError, match="labels have shape"):
        model.score({"token_ids": IDS}, IDS[:, :3])


def test_scoring_adds_no_variables(model, tmp_path):
    count = len(model.variables)
    model.score({"token_ids": IDS})
    assert len(model.variables) == count
    model.save(tmp_path / "model.keras")
    keras.saving.load_model(tmp_path / "model.keras")
