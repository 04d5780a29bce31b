"""The choice of the next token against a plain numpy version of transformers' rules."""

import functools
import sys

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_qwen.generation.sampling import Plan, choose, filter_logits, penalize
from keras_qwen.generation.settings import GenerationSettings

VOCAB = 12
# Few distinct values, so that equal logits are common.
ROWS = st.lists(
    st.lists(st.sampled_from([-30.0, -2.5, -0.5, 0.0, 0.25, 1.0, 1.5, 3.0]), min_size=VOCAB, max_size=VOCAB),
    min_size=2,
    max_size=2,
)


@functools.cache
def compiled(function, plan):
    """`function(logits, numbers, plan)`, compiled as in use; eager loops would be compiled for every example."""
    if keras.backend.backend() == "jax":
        return sys.modules["jax"].jit(lambda logits, numbers: function(logits, numbers, plan))
    if keras.backend.backend() == "tensorflow":
        return sys.modules["tensorflow"].function(lambda logits, numbers: function(logits, numbers, plan))
    return lambda logits, numbers: function(logits, numbers, plan)


def run(function, logits, numbers, plan):
    numbers = {name: keras.ops.convert_to_tensor(value) for name, value in numbers.items()}
    logits = keras.ops.convert_to_tensor(np.asarray(logits, "float32"))
    return keras.ops.convert_to_numpy(compiled(function, plan)(logits, numbers))


def kept(logits, top_k=0, top_p=1.0, min_p=0.0):
    """For one row, whether each token stays: surely, and possibly, where rounding decides."""
    logits = np.asarray(logits, "float64")
    stays = np.ones(VOCAB, bool)
    if 0 < top_k < VOCAB:
        stays &= logits >= np.sort(logits)[-top_k]
    surely, possibly = stays.copy(), stays.copy()
    if top_p < 1:
        weights = np.where(stays, np.exp(logits - logits.max()), 0)
        probabilities = weights / weights.sum()
        likelier = np.array([probabilities[logits > value].sum() for value in logits])
        surely &= likelier < top_p - 1e-5
        possibly &= likelier < top_p + 1e-5
    if min_p > 0:
        ratio = np.exp(logits - logits.max())
        surely &= ratio >= min_p * (1 + 1e-5)
        possibly &= ratio >= min_p * (1 - 1e-5)
    return surely, possibly


@settings(max_examples=60)
@given(ROWS, st.integers(0, VOCAB + 3), st.floats(0.01, 0.999), st.floats(0.0, 1.0))
def test_filters(rows, top_k, top_p, min_p):
    numbers = dict(top_k=np.int32(top_k), top_p=np.float32(top_p), min_p=np.float32(min_p))
    for plan in (
        Plan(sample=True, penalty=False, top_k=True),
        Plan(sample=True, penalty=False, top_p=True),
        Plan(sample=True, penalty=False, top_k=True, top_p=True, min_p=True),
    ):
        filtered = run(filter_logits, rows, {**numbers, "top_k": np.int32(max(top_k, 1))}, plan)
        for row, result in zip(rows, filtered, strict=True):
            surely, possibly = kept(
                row, max(top_k, 1) if plan.top_k else 0, top_p if plan.top_p else 1.0, min_p if plan.min_p else 0.0
            )
            stays = np.isfinite(result)
            assert stays.any()
            assert not (surely & ~stays).any() and not (stays & ~possibly).any()
            np.testing.assert_array_equal(result[stays], np.asarray(row, "float32")[stays])


def test_top_k_keeps_equals_of_the_last_and_forbidden_tokens_stay_out():
    plan = Plan(sample=True, penalty=False, top_k=True)
    logits = [[1.0, 2.0, 2.0, 3.0, -np.inf, 0.0]]
    result = run(filter_logits, logits, {"top_k": np.int32(2)}, plan)
    np.testing.assert_array_equal(np.isfinite(result), [[False, True, True, True, False, False]])


def test_penalty():
    logits, seen = np.array([[2.0, -2.0, 1.0, 0.0]], "float32"), np.array([[True, True, False, True]])
    penalized = penalize(keras.ops.convert_to_tensor(logits), keras.ops.convert_to_tensor(seen), 2.0)
    np.testing.assert_allclose(keras.ops.convert_to_numpy(penalized), [[1.0, -4.0, 1.0, 0.0]])


@pytest.mark.parametrize("temperature, top_k", [(1.0, 0), (0.5, 0), (2.0, 3)])
def test_draws_follow_the_probabilities(temperature, top_k):
    row = np.array([2.0, 1.0, 0.0, -1.0, 0.5], "float32")
    scaled = row / temperature
    if top_k:
        scaled = np.where(scaled >= np.sort(scaled)[-top_k], scaled, -np.inf)
    want = np.exp(scaled) / np.exp(scaled).sum()
    key = np.array([7, 9], keras.random.SeedGenerator(0).state.dtype)
    plan = Plan(sample=True, penalty=False, top_k=bool(top_k))
    numbers = {"temperature": np.float32(temperature), "top_k": np.int32(top_k), "key": key}
    draw = lambda logits, numbers, plan: choose(logits, None, numbers, plan)  # noqa: E731
    drawn = run(draw, np.tile(row, (8000, 1)), numbers, plan)
    np.testing.assert_allclose(np.bincount(drawn, minlength=5) / 8000, want, atol=0.02)
    np.testing.assert_array_equal(drawn, run(draw, np.tile(row, (8000, 1)), numbers, plan))


def test_a_plan_computes_only_what_is_on():
    def plan(**arguments):
        resolved = GenerationSettings.resolve(prompt_length=1, context_length=9, **arguments)
        return Plan.of(resolved, vocab_size=100)

    assert plan() == plan(temperature=0.0, top_k=5, seed=1) == Plan(sample=False, penalty=False)
    assert plan(repetition_penalty=1.1) == Plan(sample=False, penalty=True)
    assert plan(temperature=0.3, top_k=0) == plan(temperature=0.7, top_k=100, top_p=1.0)
    assert plan(temperature=0.3, top_k=7, top_p=0.5) == plan(temperature=0.9, top_k=50, top_p=0.9)
