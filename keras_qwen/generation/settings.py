"""How the next token is chosen and when to stop: the caller's arguments over the checkpoint's generation_config."""

import dataclasses
import math
from collections.abc import Mapping

# What transformers does where neither the caller nor generation_config.json says anything.
_TOP_K = 50
_MAX_NEW_TOKENS = 256  # our own: transformers' 20 cuts every answer short


@dataclasses.dataclass(frozen=True)
class GenerationSettings:
    """The settings of one call of `generate`, resolved and checked.

    Greedy where `temperature` is 0. A filter that is off has the value that keeps everything: `top_k` 0, `top_p` 1,
    `min_p` 0, `repetition_penalty` 1.
    """

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    stop_ids: frozenset[int]
    stop_strings: tuple[str, ...]
    seed: int | None

    @classmethod
    def resolve(
        cls,
        generation_config: Mapping | None = None,
        *,
        prompt_length,
        context_length,
        max_new_tokens=None,
        temperature=None,
        top_k=None,
        top_p=None,
        min_p=None,
        repetition_penalty=None,
        stop=None,
        seed=None,
    ):
        """Fills in what is None, see `Generator.generate` for the arguments and the rules.

        Args:
            generation_config: contents of `generation_config.json`, or None.
            prompt_length: tokens of the longest prompt.
            context_length: the model's `max_position_embeddings`.

        Raises:
            ValueError: for a setting out of its range; the message names it.
        """
        given = {name: value for name, value in (generation_config or {}).items() if value is not None}
        sampling = given.get("do_sample", False)
        if temperature is not None:
            sampling = temperature > 0
        elif any(value is not None for value in (top_k, top_p, min_p)):
            sampling = True

        def choose(name, value, default):
            return given.get(name, default) if value is None else value

        stop_ids, stop_strings = _stops(given, stop)
        settings = cls(
            max_new_tokens=_max_new_tokens(given, max_new_tokens, prompt_length, context_length),
            temperature=choose("temperature", temperature, 1.0),
            top_k=choose("top_k", top_k, _TOP_K),
            top_p=choose("top_p", top_p, 1.0),
            min_p=choose("min_p", min_p, 0.0),
            repetition_penalty=choose("repetition_penalty", repetition_penalty, 1.0),
            stop_ids=stop_ids,
            stop_strings=stop_strings,
            seed=seed,
        )
        settings._check()
        return settings if sampling else dataclasses.replace(settings, temperature=0.0)

    def _check(self):
        rules = {
            "max_new_tokens": ("an integer of at least 0", _is_integer(self.max_new_tokens, 0)),
            "temperature": ("a number of at least 0 (0 = greedy)", _is_number(self.temperature, low=0)),
            "top_k": ("an integer of at least 0 (0 = off)", _is_integer(self.top_k, 0)),
            "top_p": ("above 0 and at most 1 (1 = off)", _is_number(self.top_p, above=0, high=1)),
            "min_p": ("from 0 (off) to 1", _is_number(self.min_p, low=0, high=1)),
            "repetition_penalty": ("above 0 (1 = off)", _is_number(self.repetition_penalty, above=0)),
            "seed": ("None or an integer of at least 0", self.seed is None or _is_integer(self.seed, 0)),
        }
        for name, (rule, holds) in rules.items():
            if not holds:
                raise ValueError(f"{name} must be {rule}, not {getattr(self, name)!r}.")


def _max_new_tokens(given, max_new_tokens, prompt_length, context_length):
    if max_new_tokens is not None:
        return max_new_tokens
    if "max_new_tokens" in given:
        return given["max_new_tokens"]
    if "max_length" in given:
        return max(given["max_length"] - prompt_length, 0)
    return max(min(_MAX_NEW_TOKENS, context_length - prompt_length), 0)


def _stops(given, stop):
    """Stop ids and strings: the checkpoint's end-of-text ids and those of the caller, who turns all off with `[]`."""
    ends = given.get("eos_token_id", [])
    ids, strings = {ends} if isinstance(ends, int) else set(ends), []
    if stop is None:
        return frozenset(ids), ()
    given_stops = [stop] if isinstance(stop, str) or hasattr(stop, "__index__") else list(stop)
    if not given_stops:
        return frozenset(), ()
    for one in given_stops:
        if isinstance(one, str) and one:
            strings.append(one)
        elif hasattr(one, "__index__"):
            ids.add(int(one))
        else:
            raise ValueError(f"stop takes texts and token ids, not {one!r}; stop=[] turns every stop off.")
    return frozenset(ids), tuple(strings)


def _is_integer(value, low):
    return hasattr(value, "__index__") and not isinstance(value, bool) and value >= low


def _is_number(value, *, low=-math.inf, above=-math.inf, high=math.inf):
    number = isinstance(value, int | float) or hasattr(value, "__float__")
    return number and math.isfinite(value) and value >= low and value > above and value <= high
