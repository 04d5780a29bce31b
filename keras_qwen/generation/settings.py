"""How the next token is chosen and when to stop: the caller's arguments over the checkpoint's generation_config."""

import dataclasses
import math
from numbers import Integral, Real

_TOP_K = 50  # transformers' default for a model that samples
_MAX_NEW_TOKENS = 256  # ours: transformers' 20 cuts every answer short


@dataclasses.dataclass(frozen=True)
class GenerationSettings:
    """The settings of one call of `generate`, complete and checked.

    Greedy where `temperature` is 0. A filter that is off has the value that keeps everything: `top_k` 0, `top_p` 1,
    `min_p` 0, `repetition_penalty` 1.
    """

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int | None
    stop_ids: frozenset[int]
    stop_strings: tuple[str, ...]

    @classmethod
    def resolve(
        cls,
        generation_config=None,
        *,
        prompt_length,
        context_length,
        tokenizer=None,
        max_new_tokens=None,
        temperature=None,
        top_k=None,
        top_p=None,
        min_p=None,
        repetition_penalty=None,
        stop=None,
        seed=None,
    ):
        """Fills in what is None; the rules are those of `QwenCausalLM.generate`.

        Args:
            generation_config: contents of `generation_config.json`, or None.
            prompt_length: tokens of the longest prompt.
            context_length: the model's `max_position_embeddings`.
            tokenizer: a `QwenTokenizer`, or None.

        Raises:
            ValueError: for a setting out of its range; the message names it.
        """
        checkpoint = {name: value for name, value in (generation_config or {}).items() if value is not None}
        sampling = checkpoint.get("do_sample", False)
        if temperature is not None:
            sampling = temperature != 0
        elif any(value is not None for value in (top_k, top_p, min_p)):
            sampling = True

        def choose(name, value, default):
            return checkpoint.get(name, default) if value is None else value

        stop_ids, stop_strings = _stops(checkpoint, stop, tokenizer)
        settings = cls(
            max_new_tokens=_max_new_tokens(checkpoint, max_new_tokens, prompt_length, context_length),
            temperature=choose("temperature", temperature, 1.0),
            top_k=choose("top_k", top_k, _TOP_K),
            top_p=choose("top_p", top_p, 1.0),
            min_p=choose("min_p", min_p, 0.0),
            repetition_penalty=choose("repetition_penalty", repetition_penalty, 1.0),
            seed=seed,
            stop_ids=stop_ids,
            stop_strings=stop_strings,
        )
        settings._check()
        return settings if sampling else dataclasses.replace(settings, temperature=0.0)

    def _check(self):
        rules = {
            "max_new_tokens": ("an integer from 0", _is_integer(self.max_new_tokens)),
            "temperature": ("a number from 0 (greedy)", _is_number(self.temperature) and self.temperature >= 0),
            "top_k": ("an integer from 0 (off)", _is_integer(self.top_k)),
            "top_p": ("above 0 and at most 1 (off)", _is_number(self.top_p) and 0 < self.top_p <= 1),
            "min_p": ("from 0 (off) to 1", _is_number(self.min_p) and 0 <= self.min_p <= 1),
            "repetition_penalty": (
                "a number above 0 (1 is off)",
                _is_number(self.repetition_penalty) and self.repetition_penalty > 0,
            ),
            "seed": ("an integer from 0, or None", self.seed is None or _is_integer(self.seed)),
        }
        for name, (rule, holds) in rules.items():
            if not holds:
                raise ValueError(f"{name} must be {rule}, not {getattr(self, name)!r}.")


def _max_new_tokens(checkpoint, max_new_tokens, prompt_length, context_length):
    if max_new_tokens is not None:
        return max_new_tokens
    if "max_new_tokens" in checkpoint:
        return checkpoint["max_new_tokens"]
    if "max_length" in checkpoint:
        return max(checkpoint["max_length"] - prompt_length, 0)
    return max(min(_MAX_NEW_TOKENS, context_length - prompt_length), 0)


def _stops(checkpoint, stop, tokenizer):
    """Ids and strings to stop at: the checkpoint's end-of-text ids and the caller's; none at all for `stop=[]`."""
    if stop is None:
        stop = ()
    elif isinstance(stop, str | Integral):
        stop = (stop,)
    elif not len(stop):
        return frozenset(), ()
    ends = checkpoint.get("eos_token_id", ())
    ids, strings = {ends} if isinstance(ends, int) else set(ends), []
    for one in stop:
        if isinstance(one, Integral):
            ids.add(int(one))
        elif not isinstance(one, str) or not one:
            raise ValueError(f"stop takes texts and token ids, not {one!r}; stop=[] turns every stop off.")
        elif tokenizer is None:
            raise ValueError(f"stop={one!r} is text, but this model has no tokenizer: set model.tokenizer, or use ids.")
        elif (special := tokenizer.token_to_id(one)) in tokenizer.special_token_ids:
            ids.add(special)  # its text never shows
        else:
            strings.append(one)
    return frozenset(ids), tuple(strings)


def _is_integer(value):
    return isinstance(value, Integral) and not isinstance(value, bool) and value >= 0


def _is_number(value):
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
