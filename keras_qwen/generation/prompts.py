"""What `generate` is given, as rows of token ids, and in which kind the answer goes back."""

import dataclasses
from collections.abc import Mapping
from numbers import Integral

import numpy as np


@dataclasses.dataclass(frozen=True)
class Prompts:
    """Rows of token ids, and the kind of the answer.

    Attributes:
        rows: a list of ids a prompt.
        text: whether the answer is text rather than ids.
        single: whether the answer is that of one prompt rather than a list.
    """

    rows: list[list[int]]
    text: bool
    single: bool

    @classmethod
    def read(cls, inputs, tokenizer, vocab_size):
        """Reads one of the forms that `Generator.generate` takes.

        Args:
            inputs: see there.
            tokenizer: a `QwenTokenizer`, or None.
            vocab_size: of the model.

        Raises:
            ValueError: for another form, no prompt, an empty one, ids out of the vocabulary, or text without a
                tokenizer.
        """
        if isinstance(inputs, str):
            return cls._of_texts([inputs], tokenizer, vocab_size, single=True)
        inputs = _listed(inputs)
        if not isinstance(inputs, list):
            raise ValueError(f"generate takes text, chat messages or token ids, not {type(inputs).__name__}.")
        if not inputs:
            raise ValueError("generate was given an empty batch: pass at least one prompt.")
        if all(isinstance(x, str) for x in inputs):
            return cls._of_texts(inputs, tokenizer, vocab_size, single=False)
        if _is_chat(inputs):
            return cls._of_chats([inputs], tokenizer, vocab_size, single=True)
        if all(_is_id(x) for x in inputs):
            return cls._checked([inputs], vocab_size, text=False, single=True)
        rows = [_listed(x) for x in inputs]
        if all(_is_chat(row) for row in rows):
            return cls._of_chats(rows, tokenizer, vocab_size, single=False)
        if all(isinstance(row, list) and all(_is_id(x) for x in row) for row in rows):
            return cls._checked(rows, vocab_size, text=False, single=False)
        raise ValueError("generate takes text, chat messages or token ids, one or a list of them, not a mixture.")

    @classmethod
    def _of_texts(cls, texts, tokenizer, vocab_size, single):
        rows = [_needed(tokenizer, "text").encode(text) for text in texts]
        return cls._checked(rows, vocab_size, text=True, single=single)

    @classmethod
    def _of_chats(cls, chats, tokenizer, vocab_size, single):
        template = _needed(tokenizer, "chat messages").apply_chat_template
        rows = [list(template(chat, add_generation_prompt=True)) for chat in chats]
        return cls._checked(rows, vocab_size, text=True, single=single)

    @classmethod
    def _checked(cls, rows, vocab_size, text, single):
        for number, row in enumerate(rows):
            if not len(row):
                which = "" if single else f" {number}"
                raise ValueError(f"Prompt{which} is empty: there is no token to continue from.")
            low, high = min(row), max(row)
            if low < 0 or high >= vocab_size:
                raise ValueError(
                    f"A prompt holds token id {low if low < 0 else high}; this model's vocabulary has ids 0 to "
                    f"{vocab_size - 1}. Does the tokenizer belong to the model?"
                )
        return cls([[int(x) for x in row] for row in rows], text, single)


def _listed(value):
    """A list for a tuple, a numpy array or a backend's tensor; anything else as it is."""
    if isinstance(value, tuple):
        return list(value)
    if not hasattr(value, "shape"):
        return value
    array = np.asarray(value)
    if array.dtype.kind not in "iu" or array.ndim > 2:
        raise ValueError(f"Token ids must be integers (length,) or (batch, length), not {array.dtype} {array.shape}.")
    return array.tolist()


def _is_id(value):
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_chat(value):
    return isinstance(value, list) and len(value) > 0 and all(isinstance(message, Mapping) for message in value)


def _needed(tokenizer, what):
    if tokenizer is None:
        raise ValueError(
            f"This model has no tokenizer, so it takes token ids, not {what}. Set model.tokenizer = "
            f"QwenTokenizer.from_pretrained(...), or pass tokenizer.encode(...) of one."
        )
    return tokenizer
