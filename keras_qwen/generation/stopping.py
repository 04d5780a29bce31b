"""One row's continuation as it grows: where it stops, and what of it may be handed out already."""

from keras_qwen.tokenizer import StreamDecoder


class Continuation:
    """Collects the tokens of one row until a stop id or a stop string.

    Args:
        stop_ids: ids that end the row; they are no part of it.
        stop_strings: texts that end it; neither they nor what follows are part of it. Of ids, those of the tokens that
            lie wholly before are.
        tokenizer: a `QwenTokenizer`; may be None for ids without stop strings.
        text: whether pieces are text rather than ids.

    Attributes:
        done: whether it has ended.
    """

    def __init__(self, stop_ids, stop_strings, tokenizer, text):
        self.done = False
        self.nothing = "" if text else []
        self._stop_ids, self._stop_strings, self._text = stop_ids, stop_strings, text
        self._decoder = StreamDecoder(tokenizer) if text or stop_strings else None
        self._held = ""  # may be the start of a stop string
        self._held_ids = []  # (id, where its text ends in the held text), not handed out yet

    def push(self, token_id):
        """Takes the next token and returns what is certain now: text, or a list of ids; either may be empty."""
        if self.done:
            return self.nothing
        if token_id in self._stop_ids:
            return self.finish()
        if self._decoder is None:
            return [token_id]
        self._held += self._decoder.push(token_id)
        self._held_ids.append((token_id, len(self._held) + self._decoder.pending))
        return self._release(len(self._held) - _open_end(self._held, self._stop_strings))

    def finish(self):
        """Ends the row and returns what was held back."""
        if self.done or self._decoder is None:
            self.done = True
            return self.nothing
        self._held += self._decoder.flush()
        piece = self._release(len(self._held) + 1)
        self.done = True
        return piece

    def _release(self, end):
        """Lets go of the held text up to `end` or the first stop string, and of the tokens that lie before."""
        found = [at for at in map(self._held.find, self._stop_strings) if at >= 0]
        if found:
            self.done, end = True, min(found)
        text, self._held = self._held[:end], self._held[end:]
        ready = [token_id for token_id, token_end in self._held_ids if token_end <= end]
        self._held_ids = [(token_id, token_end - end) for token_id, token_end in self._held_ids[len(ready) :]]
        return text if self._text else ready


def _open_end(text, strings):
    """How many characters at the end of `text` could be the start of one of `strings`, at most."""
    longest = max((len(string) for string in strings), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(string.startswith(text[-length:]) for string in strings):
            return length
    return 0
