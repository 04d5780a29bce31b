"""The two functions of decoding, and the loop around them."""

import importlib

import keras
import numpy as np
from keras import ops

from keras_qwen.generation.cache import bucket, decoding_masks, left_padded
from keras_qwen.generation.sampling import Plan, choose
from keras_qwen.ops.attention_backend import backend_module


class Decoder:
    """Generates tokens with a model that is given as functions.

    Both functions are compiled for lengths in steps (see `bucket`), not for each length; every token is one call of
    the second.

    Args:
        config: `QwenConfig`.
        call_with_cache: as of `QwenBackbone`.
        head: function of hidden states (batch, length, hidden_size) that returns logits (batch, length, vocab_size).
        weights: function that returns the model's current variables.
        cache_dtype: dtype of keys and values.
    """

    def __init__(self, config, *, call_with_cache, head, weights, cache_dtype):
        self.config = config
        self._call_with_cache, self._head, self._cache_dtype = call_with_cache, head, cache_dtype
        steps = importlib.import_module(f"keras_qwen.generation.steps_{keras.backend.backend()}")
        self._steps = steps.Steps(weights, self._prefill, self._decode)

    def tokens(self, rows, settings, sampler=None):
        """Generates token by token.

        Where no stop can come, and on accelerators, the next token is under way before one is given out; elsewhere
        nothing is computed that nobody asks for.

        Args:
            rows: the prompts, lists of ids.
            settings: `GenerationSettings`.
            sampler: an object with `compute_probabilities` and `get_next_token`, or None.

        Yields:
            int32 arrays (batch,), `settings.max_new_tokens` of them.
        """
        if not settings.max_new_tokens:
            return
        length = bucket(max(len(row) for row in rows))
        last = length + settings.max_new_tokens - 1  # where the last token would go, but nobody reads it there
        token_ids, segment_ids = left_padded(rows, length)
        starts = length - segment_ids.sum(axis=1, dtype="int32")
        plan = Plan.of(settings, self.config.vocab_size, logits=sampler is not None)
        numbers = _Numbers(settings)
        shape = (len(rows), self.config.num_key_value_heads, bucket(last), self.config.head_dim)
        session = self._steps.session(shape, self._cache_dtype, self.config.num_hidden_layers, plan)
        seen = _seen(rows, self.config.vocab_size) if plan.penalty else None

        def following(token, index):
            return _sampled(sampler, session.decode(token, np.int32(index), starts, numbers.next()))

        ahead = not (settings.stop_ids or settings.stop_strings) or backend_module().device() != "cpu"
        token = _sampled(sampler, session.prefill(token_ids, segment_ids, seen, numbers.next()))
        for index in range(length, last):
            if ahead:
                given, token = token, following(token, index)
                yield ops.convert_to_numpy(given)
            else:
                yield ops.convert_to_numpy(token)
                token = following(token, index)
        yield ops.convert_to_numpy(token)

    # What stays on the device from one to the next is `state`: the cache, and which tokens were seen or None.

    def _prefill(self, state, token_ids, segment_ids, seen, numbers, plan):
        cache, _ = state
        positions = ops.maximum(ops.cumsum(segment_ids, axis=1) - 1, 0)
        hidden, cache = self._call_with_cache(token_ids, positions, cache, 0, None, segment_ids)
        return choose(self._head(hidden[:, -1:])[:, 0], seen, numbers, plan), (cache, seen)

    def _decode(self, state, token, index, starts, numbers, plan):
        cache, seen = state
        if seen is not None:
            seen = ops.logical_or(seen, ops.one_hot(token, self.config.vocab_size, dtype="bool"))
        masks = decoding_masks(self.config, starts, index, capacity=cache[0][0].shape[2])
        hidden, cache = self._call_with_cache(
            ops.expand_dims(token, 1), ops.expand_dims(index - starts, 1), cache, index, masks
        )
        return choose(self._head(hidden)[:, 0], seen, numbers, plan), (cache, seen)


class _Numbers:
    """The numbers of a choice, with a new key for each draw."""

    def __init__(self, settings):
        self._fixed = {
            "temperature": np.float32(settings.temperature),
            "top_k": np.int32(min(settings.top_k, 2**31 - 1)),
            "top_p": np.float32(settings.top_p),
            "min_p": np.float32(settings.min_p),
            "repetition_penalty": np.float32(settings.repetition_penalty),
        }
        seed = settings.seed
        if seed is None:  # then keras.utils.set_random_seed decides
            seed = int(keras.random.randint((), 0, 2**31 - 1, dtype="int32")) if settings.temperature else 0
        self._keys = np.random.default_rng(seed)
        self._key_dtype = keras.random.SeedGenerator(0).state.dtype

    def next(self):
        return {**self._fixed, "key": self._keys.integers(0, 2**31 - 1, 2).astype(self._key_dtype)}


def _seen(rows, vocab_size):
    seen = np.zeros((len(rows), vocab_size), "bool")
    for i, row in enumerate(rows):
        seen[i, row] = True
    return seen


def _sampled(sampler, chosen):
    """The token, of the logits if a sampler chooses it."""
    if sampler is None:
        return chosen
    return ops.cast(sampler.get_next_token(sampler.compute_probabilities(chosen)), "int32")
