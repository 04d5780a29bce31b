"""Decoding token by token, for text that is shown while it is generated."""

import codecs
from collections.abc import Iterable


def _bytes_of_characters():
    """Return byte-level BPE's alphabet: the character that stands for each byte in a token, to that byte.

    Printable bytes stand for themselves, the others for the characters from 256 on, in order.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


_BYTES = _bytes_of_characters()


class StreamDecoder:
    """Turns token ids into text as they come, and never gives out half a character.

    The pieces, put together, are `tokenizer.decode(all_ids, skip_special_tokens=True)`.

    Args:
        tokenizer: a `QwenTokenizer`.

    Example:
        >>> decoder = StreamDecoder(tokenizer)
        >>> for token_id in generated:
        ...     print(decoder.push(token_id), end="", flush=True)
        >>> print(decoder.flush())
    """

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.special_token_ids)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids):
        """Take the next ids and return the text that is complete with them, which may be empty.

        Args:
            ids: one id or several.
        """
        return "".join(self._decoder.decode(self._bytes(i)) for i in (ids if isinstance(ids, Iterable) else [ids]))

    @property
    def pending(self):
        """Whether the last id ended within a character, so that bytes are waiting for the rest of it."""
        return bool(self._decoder.getstate()[0])

    def flush(self):
        """Return what is left (a replacement character for a broken one), and start anew."""
        return self._decoder.decode(b"", final=True)

    def _bytes(self, token_id):
        token = None if token_id in self._special else self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if all(character in _BYTES for character in token):
            return bytes(_BYTES[character] for character in token)
        return token.encode("utf-8")  # an added token stands for itself
