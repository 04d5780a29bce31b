"""model.generate: greedy tokens of the golden checkpoints, batches, sampling, stopping, streaming."""

import sys

import keras
import numpy as np
import pytest

from keras_qwen import QwenCausalLM, QwenConfig, QwenTokenizer
from keras_qwen.generation import loop

CONFIG = QwenConfig(
    model_type="qwen3", vocab_size=300, hidden_size=24, intermediate_size=40, num_hidden_layers=1,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, initializer_range=0.4, max_position_embeddings=128,
    tie_word_embeddings=True,
)  # fmt: skip
ROWS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2], [1]]


@pytest.fixture(scope="module")
def model():
    keras.utils.clear_session(free_memory=False)
    model = QwenCausalLM(CONFIG, dtype="float32")
    rng = np.random.default_rng(0)
    model.set_weights([(rng.normal(0, 0.4, w.shape) + (w.ndim == 1)).astype("float32") for w in model.get_weights()])
    texts = ["the quick brown fox jumps over the lazy dog", "\u6df1\u5ea6\u5b66\u4e60 \U0001f642 caf\u00e9"] * 3
    model.tokenizer = QwenTokenizer.train(texts, vocab_size=300)
    return model


def uncached(model, row, count):
    row = list(row)
    for _ in range(count):
        row.append(int(last_logits(model, row).argmax()))
    return row[-count:]


def last_logits(model, row):
    """Of the whole row without a cache; padded on the right, so that all lengths have one shape."""
    logits = model(np.array([row + [0] * (16 - len(row))]))
    return np.array(keras.ops.convert_to_numpy(logits)[0, len(row) - 1])


@pytest.mark.parametrize("name", ["qwen2", "qwen2_sliding", "qwen2_yarn", "qwen3", "qwen3_tied"])
def test_golden_greedy_tokens(reference_folder, name):
    model = QwenCausalLM.from_pretrained(reference_folder(name), dtype="float32")
    want = np.load(reference_folder(name) / "expected.npz")
    new = model.generate(want["prompt"], max_new_tokens=8, temperature=0.0, stop=[])
    assert new == want["greedy"].tolist()


def test_batch_of_unequal_prompts_equals_each_alone_and_without_a_cache(model):
    arguments = dict(max_new_tokens=6, temperature=0.0, stop=[])
    together = model.generate(ROWS, **arguments)
    for row, new in zip(ROWS, together, strict=True):
        assert new == model.generate([row], **arguments)[0]
    assert together[1] == uncached(model, ROWS[1], 6)
    assert model.generate(ROWS[1], **arguments) == [together[1]]  # one flat prompt: a list of one
    assert model.generate(np.array([ROWS[1]]), **arguments) == [together[1]]


@pytest.fixture
def traced(monkeypatch):
    """What has been traced, and so compiled: for each the function's name and the shape of the token ids or tokens."""
    found = []
    for name in ("_prefill", "_decode"):
        original = getattr(loop.Decoder, name)

        def spy(self, state, tokens, *rest, original=original, name=name):
            found.append((name, tuple(tokens.shape), state[0][0][0].shape[2]))
            return original(self, state, tokens, *rest)

        monkeypatch.setattr(loop.Decoder, name, spy)
    return found


@pytest.mark.skipif(keras.backend.backend() == "torch", reason="torch is eager")
def test_one_compilation_for_prompts_of_many_lengths(traced):
    fresh = QwenCausalLM(CONFIG, dtype="float32")
    for length, count in ((3, 2), (9, 9), (17, 32), (31, 2), (32, 2)):
        fresh.generate([list(range(length))], max_new_tokens=count, temperature=0.0, stop=[])
    assert traced == [("_prefill", (1, 32), 64), ("_decode", (1,), 64)]
    fresh.generate([list(range(33))], max_new_tokens=2, temperature=0.0, stop=[])
    assert traced[2:] == [("_prefill", (1, 64), 96), ("_decode", (1,), 96)]


@pytest.mark.skipif(keras.backend.backend() == "torch", reason="torch is eager")
def test_numbers_are_no_reason_to_compile(traced):
    fresh = QwenCausalLM(CONFIG, dtype="float32")
    for temperature, top_k, seed in ((0.5, 3, 1), (1.5, 7, 2), (2.0, 50, None)):
        fresh.generate([[1, 2]], max_new_tokens=2, temperature=temperature, top_k=top_k, seed=seed, stop=[])
    assert len(traced) == 2


def test_every_bucket_gives_the_same(model):
    prompt = list(range(5, 13))
    want = uncached(model, prompt, 4)
    for padding in (0, 25, 40):  # the other row decides on the bucket
        rows = [prompt, [7] * (8 + padding)]
        assert model.generate(rows, max_new_tokens=4, temperature=0.0, stop=[])[0] == want


def test_sampling_is_reproducible_and_filters_hold(model):
    loose = dict(temperature=1.5, top_k=200, top_p=0.999, min_p=1e-6, seed=3)  # all in one plan, compiled once

    def sample(**arguments):
        return model.generate([ROWS[0]] * 4, max_new_tokens=5, stop=[], **{**loose, **arguments})

    drawn = sample()
    assert drawn == sample() != sample(seed=4)
    assert len({tuple(row) for row in drawn}) > 1  # rows draw for themselves
    greedy = sample(temperature=0.0)
    assert sample(top_k=1) == sample(top_p=1e-6) == sample(min_p=1.0) == greedy != drawn


def test_repetition_penalty_follows_its_formula(model):
    row, seen = list(ROWS[1]), []
    for _ in range(5):
        logits = last_logits(model, row)
        ids = np.unique(row)
        logits[ids] = np.where(logits[ids] > 0, logits[ids] / 1.7, logits[ids] * 1.7)
        row.append(int(logits.argmax()))
        seen.append(row[-1])
    new = model.generate([ROWS[1]], max_new_tokens=5, temperature=0.0, repetition_penalty=1.7, stop=[])
    assert new == [seen]


def test_stop_ids_end_each_row_and_are_not_returned(model):
    free = model.generate(ROWS, max_new_tokens=8, temperature=0.0, stop=[])
    stop = free[0][3]
    stopped = model.generate(ROWS, max_new_tokens=8, temperature=0.0, stop=[stop])
    for row, cut in zip(free, stopped, strict=True):
        assert cut == (row[: row.index(stop)] if stop in row else row)


def test_generation_stops_when_every_row_has(model, monkeypatch):
    free = model.generate([ROWS[0]], max_new_tokens=8, temperature=0.0, stop=[])[0]
    calls = []
    session = sys.modules[type(model._generator._decoder._steps).__module__].Session
    original = session.decode
    monkeypatch.setattr(session, "decode", lambda self, *a: calls.append(1) or original(self, *a))
    stop = free[2]
    model.generate([ROWS[0]], max_new_tokens=8, temperature=0.0, stop=[stop])
    assert len(calls) == free.index(stop)


def test_end_of_text_of_the_generation_config(model):
    free = model.generate([ROWS[0]], max_new_tokens=8, temperature=0.0, stop=[])[0]
    model.generation_config = {"eos_token_id": [free[4], 299], "do_sample": False, "max_new_tokens": 7}
    try:
        assert model.generate([ROWS[0]]) == [free[: free.index(free[4])]]
        assert model.generate([ROWS[0]], stop=[]) == [free[:7]]
    finally:
        model.generation_config = {}


def test_text_chats_and_streams(model):
    arguments = dict(max_new_tokens=12, temperature=0.0, stop=[])
    prompt = "the quick"
    ids = model.generate([model.tokenizer.encode(prompt)], **arguments)[0]
    text = model.tokenizer.decode(ids, skip_special_tokens=True)
    assert model.generate(prompt, **arguments) == text
    assert model.generate([prompt, "dog"], **arguments)[0] == text
    pieces = list(model.generate(prompt, stream=True, **arguments))
    assert "".join(pieces) == text and len(pieces) > 1
    assert [
        t for piece in model.generate([model.tokenizer.encode(prompt)], stream=True, **arguments) for t in piece[0]
    ] == ids
    chat = [{"role": "user", "content": "fox"}]
    rendered = model.tokenizer.apply_chat_template(chat, add_generation_prompt=True)
    answer = model.tokenizer.decode(model.generate([rendered], **arguments)[0], skip_special_tokens=True)
    assert model.generate(chat, **arguments) == answer


def test_stop_strings(model):
    arguments = dict(max_new_tokens=12, temperature=0.0)
    text = model.generate("the quick", stop=[], **arguments)
    stop = text[4:6]
    cut = text[: text.index(stop)]
    assert model.generate("the quick", stop=[stop], **arguments) == cut
    assert "".join(model.generate("the quick", stop=[stop], stream=True, **arguments)) == cut


def test_a_batch_of_texts_streams_lists(model):
    arguments = dict(max_new_tokens=6, temperature=0.0, stop=[])
    prompts = ["the quick", "dog"]
    pieces = list(model.generate(prompts, stream=True, **arguments))
    assert all(isinstance(piece, list) and len(piece) == 2 for piece in pieces)
    assert ["".join(row) for row in zip(*pieces, strict=True)] == model.generate(prompts, **arguments)
    flat = model.tokenizer.encode("dog")
    assert list(model.generate(flat, stream=True, **arguments)) == model.generate(flat, **arguments)[0]


def test_a_stream_is_checked_at_once_and_computes_on_demand(model):
    with pytest.raises(ValueError, match="temperature"):
        model.generate([1], stream=True, temperature=-1.0)
    stream = model.generate([1, 2], stream=True, max_new_tokens=100, temperature=0.0, stop=[])
    assert [next(stream), next(stream)] == uncached(model, [1, 2], 2)
    stream.close()


def test_no_new_tokens(model):
    assert model.generate([1], max_new_tokens=0) == [[]]
    assert model.generate("dog", max_new_tokens=0) == ""
    assert list(model.generate("dog", max_new_tokens=0, stream=True)) == []


def test_beyond_the_context_it_warns_once():
    fresh = QwenCausalLM(CONFIG, dtype="float32")
    with pytest.warns(UserWarning, match="max_position_embeddings=128"):
        assert len(fresh.generate([[1] * 120], max_new_tokens=10, temperature=0.0, stop=[])[0]) == 10
    fresh.generate([[1] * 120], max_new_tokens=10, temperature=0.0, stop=[])


def test_trained_weights_take_effect(model):
    fresh = QwenCausalLM(CONFIG, dtype="float32")
    arguments = dict(max_new_tokens=4, temperature=0.0, stop=[])
    before = fresh.generate([ROWS[1]], **arguments)
    fresh.set_weights(model.get_weights())
    after = fresh.generate([ROWS[1]], **arguments)
    assert after == model.generate([ROWS[1]], **arguments) and after != before


@pytest.mark.parametrize("dtype", ["bfloat16", "mixed_float16"])
def test_half_precision(model, dtype):
    half = QwenCausalLM(CONFIG, dtype=dtype)
    half.set_weights(model.get_weights())
    new = half.generate(ROWS, max_new_tokens=3, temperature=0.0, stop=[])
    assert [len(row) for row in new] == [3, 3, 3]


def test_keras_hub_sampler(model):
    keras_hub = pytest.importorskip("keras_hub")
    greedy = model.generate(ROWS, max_new_tokens=4, temperature=0.0, stop=[])
    for sampler in (keras_hub.samplers.GreedySampler(), "greedy"):
        assert model.generate(ROWS, max_new_tokens=4, sampler=sampler, stop=[]) == greedy
    draws = [
        model.generate([1, 2], max_new_tokens=4, sampler=keras_hub.samplers.RandomSampler(seed=s), stop=[])
        for s in (1, 1, 2)
    ]
    assert draws[0] == draws[1] != draws[2]
    with pytest.raises(ValueError, match="temperature, seed"):
        model.generate([1], sampler="greedy", temperature=0.5, seed=1)
    with pytest.raises(ValueError, match="keras_hub.samplers"):
        model.generate([1], sampler=print)


@pytest.mark.parametrize(
    "inputs, arguments, words",
    [
        ([], {}, "empty|no prompt"),
        ([[]], {}, "empty"),
        ("", {}, "empty"),
        ([[300]], {}, "300"),
        ([[-1]], {}, "-1"),
        ([[1]], {"max_new_tokens": -1}, "max_new_tokens"),
        ([[1]], {"temperature": -0.1}, "temperature"),
        ([[1]], {"top_p": 0.0}, "top_p"),
        ([[1]], {"top_k": -1}, "top_k"),
        ([[1]], {"repetition_penalty": 0.0}, "repetition_penalty"),
    ],
)
def test_bad_input(model, inputs, arguments, words):
    with pytest.raises(ValueError, match=words):
        model.generate(inputs, **arguments)


def test_text_without_a_tokenizer():
    with pytest.raises(ValueError, match="tokenizer"):
        QwenCausalLM(CONFIG, dtype="float32").generate("hello")
