"""From a record to training examples: tokens, which of them are trained on, and what became of what does not fit."""

from typing import NamedTuple

import numpy as np

from keras_qwen.data.chat import encode_turns
from keras_qwen.data.pieces import pieces_of
from keras_qwen.data.records import Text, check_roles, read_document, read_preference

_END_OF_TEXT = "<|endoftext|>"  # what Qwen's pre-training puts behind a document


class Encoded(NamedTuple):
    """What became of a record.

    Attributes:
        examples: list of examples, each a tuple of documents `(token_ids, mask)`: one, or a preference's two.
        problem: why there is none, or None.
        split: whether the document was cut.
        dropped: whether it was left out, being too long.
    """

    examples: list
    problem: str | None = None
    split: bool = False
    dropped: bool = False


class Encoder:
    """Encodes the records of a source.

    Args:
        tokenizer: `QwenTokenizer`.
        sequence_length, too_long, on_error: as of `ChatDataset`.
        template_variables: dict.
        preferences: whether records are preferences.
    """

    def __init__(self, tokenizer, sequence_length, too_long, on_error, template_variables, preferences=False):
        self.tokenizer, self.sequence_length = tokenizer, sequence_length
        self.too_long, self.on_error = too_long, on_error
        self.template_variables, self.preferences = template_variables, preferences

    def __call__(self, source, index):
        """Encode one record.

        Args:
            source: what `open_source` returns.
            index: position of the record.

        Returns:
            An `Encoded`.

        Raises:
            ValueError: the record cannot be used, and `on_error` or `too_long` is "raise"; names file and line.
        """
        try:
            record = source[index]
            documents = self._preference(record) if self.preferences else (self._document(record),)
        except ValueError as error:
            problem = f"{source.where(index)}: {error}"
            if self.on_error == "raise":
                raise ValueError(f"{problem} (on_error='skip' leaves such documents out)") from error
            return Encoded([], problem)
        parts = [pieces_of(document, self.sequence_length, self.too_long) for document in documents]
        if None in parts:
            longest = max(len(ids) for ids, _ in documents)
            if self.too_long == "raise":
                remedy = "'drop'" if self.preferences else "'split' or 'drop'"
                raise ValueError(
                    f"{source.where(index)}: {longest} tokens do not fit into sequence_length={self.sequence_length}: "
                    f"raise it, or choose too_long={remedy}"
                )
            return Encoded([], dropped=True)
        if not all(parts):
            return Encoded([], f"{source.where(index)}: no token in it is trained on")
        examples = list(zip(*parts, strict=True))
        return Encoded(examples, split=len(documents[0][0]) > self.sequence_length + 1)

    def _document(self, record):
        document = read_document(record)
        if isinstance(document, Text):
            ids = self.tokenizer.encode(document.text, add_special_tokens=False)
            ids += [self._end_of_text()] if document.ends else []
            return np.array(ids, "int32"), np.ones(len(ids), "bool")
        return self._chat(document)

    def _preference(self, record):
        chosen, rejected, prompt_length = read_preference(record)
        return self._chat(chosen, prompt_length), self._chat(rejected, prompt_length)

    def _chat(self, chat, prompt_length=0):
        variables = {**self.template_variables, **chat.variables}
        ids, turns = encode_turns(self.tokenizer, chat.messages, chat.tools, variables)
        check_roles(chat.messages)
        mask = np.zeros(len(ids), "bool")
        # The prompt's own turns are not what is compared.
        for first, last in turns[sum(message["role"] == "assistant" for message in chat.messages[:prompt_length]) :]:
            mask[first:last] = True
        return np.array(ids, "int32"), mask

    def _end_of_text(self):
        end = self.tokenizer.token_to_id(_END_OF_TEXT)
        end = self.tokenizer.eos_token_id if end is None else end
        if end is None:
            raise ValueError(f"the tokenizer has neither {_END_OF_TEXT} nor an eos_token to end a text with")
        return end
