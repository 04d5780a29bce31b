"""Arguments of generate over generation_config.json."""

import math

import pytest

from keras_qwen import QwenTokenizer
from keras_qwen.generation.settings import GenerationSettings

QWEN = {
    "do_sample": True,
    "temperature": 0.7,
    "top_k": 20,
    "top_p": 0.8,
    "repetition_penalty": 1.1,
    "eos_token_id": [5, 6],
}


def resolve(checkpoint=None, prompt_length=10, context_length=1000, **arguments):
    return GenerationSettings.resolve(
        checkpoint, prompt_length=prompt_length, context_length=context_length, **arguments
    )


def test_a_checkpoint_says_all():
    settings = resolve(QWEN)
    assert (settings.temperature, settings.top_k, settings.top_p, settings.repetition_penalty) == (0.7, 20, 0.8, 1.1)
    assert settings.stop_ids == {5, 6} and settings.seed is None and settings.min_p == 0


def test_arguments_win():
    settings = resolve(QWEN, temperature=0.2, top_k=0, top_p=1, min_p=0.1, repetition_penalty=1, seed=3)
    assert (settings.temperature, settings.top_k, settings.top_p, settings.min_p) == (0.2, 0, 1, 0.1)
    assert (settings.repetition_penalty, settings.seed) == (1, 3)
    assert resolve(QWEN, temperature=0).temperature == 0


@pytest.mark.parametrize(
    "checkpoint, arguments, temperature",
    [
        (None, {}, 0),
        ({}, {"seed": 1}, 0),
        ({"temperature": 0.6}, {}, 0),  # as transformers: without do_sample it is greedy
        ({"do_sample": False, "temperature": 0.6}, {"top_p": 0.9}, 0.6),
        ({}, {"top_k": 5}, 1.0),
        ({}, {"temperature": 0.3}, 0.3),
        ({"do_sample": True}, {}, 1.0),
        ({"do_sample": True, "temperature": None}, {}, 1.0),
    ],
)
def test_when_it_samples(checkpoint, arguments, temperature):
    assert resolve(checkpoint, **arguments).temperature == temperature


def test_top_k_of_transformers_is_the_default():
    assert resolve({}, temperature=1.0).top_k == 50


@pytest.mark.parametrize(
    "checkpoint, arguments, count",
    [
        ({}, {}, 256),
        ({}, {"context_length": 100}, 90),
        ({}, {"context_length": 5}, 0),
        ({}, {"context_length": 5, "max_new_tokens": 7}, 7),
        ({"max_new_tokens": 33, "max_length": 20}, {}, 33),
        ({"max_length": 50}, {}, 40),
        ({"max_length": 5}, {}, 0),
        ({"max_new_tokens": 33}, {"max_new_tokens": 0}, 0),
    ],
)
def test_how_many_tokens(checkpoint, arguments, count):
    assert resolve(checkpoint, **arguments).max_new_tokens == count


def test_stops():
    tokenizer = QwenTokenizer.train(["some text"], vocab_size=270)
    end = tokenizer.token_to_id("<|im_end|>")
    assert resolve({"eos_token_id": 4}).stop_ids == {4}
    assert resolve({"eos_token_id": 4}, stop=[]).stop_ids == frozenset()
    both = resolve({"eos_token_id": [4]}, stop=["\n\n", 9, "<|im_end|>"], tokenizer=tokenizer)
    assert (both.stop_ids, both.stop_strings) == ({4, 9, end}, ("\n\n",))
    assert resolve(stop="ab", tokenizer=tokenizer).stop_strings == ("ab",)
    assert resolve(stop=7).stop_ids == {7}


@pytest.mark.parametrize(
    "name, value",
    [
        ("max_new_tokens", -1),
        ("max_new_tokens", 1.5),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", "hot"),
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_p", 0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("seed", -1),
        ("seed", 0.5),
        ("stop", [""]),
        ("stop", [1.5]),
        ("stop", ["text without a tokenizer"]),
    ],
)
def test_out_of_range(name, value):
    with pytest.raises(ValueError, match=name):
        resolve(**{name: value})
