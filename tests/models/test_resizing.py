"""resize_token_embeddings: embeddings, head, config, and what is saved."""

import json

import keras
import numpy as np
import pytest

from keras_qwen import QwenCausalLM, QwenConfig

IDS = np.random.default_rng(0).integers(0, 61, (4, 9)).astype("int32")


def make(tied):
    return QwenCausalLM(
        QwenConfig(
            model_type="qwen3", vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=1,
            num_attention_heads=4, num_key_value_heads=2, head_dim=8, initializer_range=0.3, tie_word_embeddings=tied,
        ), dtype="float32",
    )  # fmt: skip


def numpy(x):
    return keras.ops.convert_to_numpy(x)


@pytest.mark.parametrize("tied", [False, True])
def test_more_tokens(tied, tmp_path):
    model = make(tied)
    before, table = numpy(model(IDS)), numpy(model.backbone.embed_tokens.embeddings)
    model.compile(keras.optimizers.SGD(0.5))
    model.predict(IDS, verbose=0)
    assert model.resize_token_embeddings(62, pad_to_multiple_of=8) == 64
    assert model.config.vocab_size == model.backbone.config.vocab_size == 64
    assert model.output_shape == (None, None, 64)
    logits = numpy(model(IDS))
    np.testing.assert_allclose(logits[..., :61], before, atol=1e-6)
    np.testing.assert_allclose(logits[..., 61:], np.repeat(before.mean(-1, keepdims=True), 3, -1), atol=1e-5)
    found = numpy(model.backbone.embed_tokens.embeddings)
    np.testing.assert_array_equal(found[:61], table)
    np.testing.assert_allclose(found[61:], np.repeat(table.mean(0, keepdims=True), 3, 0), atol=1e-6)

    new = np.full_like(IDS, 63)
    model.fit(new, np.full_like(IDS, 62), verbose=0)
    trained = numpy(model.backbone.embed_tokens.embeddings)
    assert (trained[63] != found[63]).any()
    np.testing.assert_allclose(model.predict(new, verbose=0), numpy(model(new)), atol=1e-5)
    assert len(model.generate([[63, 1]], max_new_tokens=2, stop=[])[0]) == 2
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == 64
    again = QwenCausalLM.from_pretrained(tmp_path, dtype="float32")
    np.testing.assert_array_equal(numpy(again(new)), numpy(model(new)))


def test_fewer_tokens():
    model = make(False)
    model.resize_token_embeddings(40)
    assert numpy(model(IDS % 40)).shape == (4, 9, 40)
    with pytest.raises(ValueError, match="ids 0 to 39"):
        model(np.full((1, 2), 40))


def test_frozen_stays_frozen_and_compiled_functions_follow():
    model = make(True)
    model.enable_lora(2)
    model.compile(keras.optimizers.SGD(0.5))
    inputs = {"token_ids": IDS}
    model.fit(inputs, IDS, verbose=0)
    score = model.score(inputs)
    model.resize_token_embeddings(70)
    assert all("lora" in v.path for v in model.trainable_variables)
    assert (model.score(inputs)[:, :-1] < score[:, :-1]).all()  # more tokens share the probability
    model.fit({"token_ids": np.full_like(IDS, 69)}, IDS, verbose=0)


@pytest.mark.parametrize("size", [0, -1, 1.5, True])
def test_sizes_that_are_none(size):
    with pytest.raises(ValueError, match="new_num_tokens"):
        make(True).resize_token_embeddings(size)


def test_not_under_an_adapters_copy():
    model = make(True)
    model.enable_lora(2, modules_to_save=["embed_tokens"])
    with pytest.raises(ValueError, match="'default' has a copy of embed_tokens"):
        model.resize_token_embeddings(64)
