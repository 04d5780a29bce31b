"""ChatDataset under `fit`, and that packed documents do not see each other."""

from pathlib import Path

import keras
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import keras_qwen as kq

SIZES = dict(vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"What is {i}?"},
            {"role": "assistant", "content": f"{i}. " * (1 + i % 5)},
        ]
    }
    for i in range(15)
]


@pytest.fixture(scope="module")
def tokenizer():
    return kq.QwenTokenizer.train(["What is it?"], 270)


@pytest.fixture
def model():
    model = kq.QwenCausalLM(kq.QwenConfig(model_type="qwen3", num_key_value_heads=1, head_dim=16, **SIZES))
    model.compile(keras.optimizers.SGD(0.1))
    return model


def make(tokenizer, **changed):
    return kq.data.ChatDataset(CHATS, tokenizer, **{"sequence_length": 96, "batch_size": 2, **changed})


class Seen(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.losses, self.steps = [], None

    def on_train_begin(self, logs=None):
        self.steps = self.params["steps"]

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(logs["loss"])


@pytest.mark.parametrize("packing", ["best_fit", None])
def test_fit_is_training_on_its_batches(model, tokenizer, packing):
    """Two epochs under `fit` give the weights that the same batches give one by one; warnings are errors here."""
    other = kq.QwenCausalLM(model.config)
    other.set_weights(model.get_weights())
    other.compile(keras.optimizers.SGD(0.1))
    dataset, again = make(tokenizer, packing=packing), make(tokenizer, packing=packing)
    seen = Seen()
    history = model.fit(dataset, epochs=2, verbose=0, callbacks=[seen], validation_data=make(tokenizer, shuffle=False))
    for _ in range(2):
        for inputs, labels, weights in again:
            other.train_on_batch(inputs, labels, sample_weight=weights)
    assert seen.steps == len(dataset) and len(seen.losses) == 2 * len(dataset)
    assert history.history["loss"][1] < history.history["loss"][0] and "val_loss" in history.history
    for one, two in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(one, two, atol=2e-5)
    assert dataset.get_state(2 * len(dataset))["epoch"] == 2


def test_packing_and_padding_are_one_loss(model, tokenizer):
    losses = [
        model.evaluate(make(tokenizer, packing=packing, batch_size=64), verbose=0, return_dict=True)["loss"]
        for packing in ("best_fit", "first_fit", None)
    ]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-5)


def test_without_end(model, tokenizer):
    dataset = make(tokenizer, repeat=True)
    seen = Seen()
    model.fit(dataset, epochs=3, steps_per_epoch=len(dataset) - 1, verbose=0, callbacks=[seen])
    assert len(seen.losses) == 3 * (len(dataset) - 1)


def test_goes_on_in_the_middle_of_an_epoch(model, tokenizer):
    """What was trained on before the position is not seen again, and the epoch ends where it would have ended."""
    begin = model.get_weights()
    straight = Seen()
    model.fit(make(tokenizer), verbose=0, callbacks=[straight])
    end = model.get_weights()
    model.set_weights(begin)
    first, second = make(tokenizer, repeat=True), make(tokenizer)
    model.fit(first, steps_per_epoch=2, verbose=0)
    second.set_state(first.get_state(2))
    model.fit(second, steps_per_epoch=len(second) - 2, verbose=0)
    for one, two in zip(model.get_weights(), end, strict=True):
        np.testing.assert_array_equal(one, two)


def test_an_ordinary_keras_model(tokenizer):
    """Its `fit` looks at a batch before it begins, to build the model: that batch is not lost."""
    inputs = {name: keras.Input((None,), dtype="int32", name=name) for name in ("token_ids", "segment_ids")}
    hidden = keras.layers.Embedding(300, 8)(inputs["token_ids"])
    outputs = keras.layers.Dense(300)(hidden) + 0.0 * keras.ops.cast(inputs["segment_ids"], "float32")[..., None]
    model = keras.Model(inputs, outputs)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, weighted_metrics=["sparse_categorical_accuracy"])
    dataset, seen = make(tokenizer), Seen()
    model.fit(dataset, epochs=2, verbose=0, callbacks=[seen])
    assert len(seen.losses) == 2 * len(dataset)
    assert dataset.get_state() | {"fingerprint": None} == {"epoch": 2, "batch": 0, "fingerprint": None}


@pytest.fixture(scope="module")
def golden():
    path = Path(__file__).parent / "reference"
    return {name: kq.QwenCausalLM.from_pretrained(path / name) for name in ("qwen2", "qwen3")}


@settings(max_examples=10, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.sampled_from(["qwen2", "qwen3"]), st.sampled_from(["best_fit", "first_fit"]))
def test_documents_never_see_each_other(golden, data, name, packing):
    """One packed document is changed; the logits of all others stay as they were, to the last bit."""
    model = golden[name]
    lengths = data.draw(st.lists(st.integers(2, 12), min_size=2, max_size=6))
    random = np.random.default_rng(len(lengths))
    vocab_size = model.config.vocab_size
    examples = [{"token_ids": random.integers(0, vocab_size, n), "assistant_mask": np.ones(n, int)} for n in lengths]
    packed = kq.data.pack(examples, 24, packing=packing)
    ids, segments = (
        np.pad(packed.inputs[name], ((0, 6 - len(packed.labels)), (0, 0))) for name in ("token_ids", "segment_ids")
    )  # rows of padding, so that there is one shape to compile
    row = data.draw(st.integers(0, len(packed.labels) - 1))
    segment = data.draw(st.integers(1, int(segments[row].max())))
    changed = np.zeros(segments.shape, bool)
    changed[row] = segments[row] == segment
    others = np.where(changed, (ids + 7) % vocab_size, ids)
    before, after = (
        keras.ops.convert_to_numpy(model({"token_ids": tokens, "segment_ids": segments})) for tokens in (ids, others)
    )
    untouched = (segments > 0) & ~changed
    np.testing.assert_array_equal(before[untouched], after[untouched])
    assert np.abs(before[changed] - after[changed]).max() > 1e-3
    # And a document's logits are those that it has alone.
    alone = np.zeros((2, 1, 24), "int32")  # its tokens, and a mask
    alone[0, 0, : changed.sum()], alone[1, 0, : changed.sum()] = others[changed], 1
    logits = keras.ops.convert_to_numpy(model({"token_ids": alone[0], "padding_mask": alone[1]}))[0]
    np.testing.assert_allclose(after[changed], logits[: changed.sum()], atol=3e-5)
