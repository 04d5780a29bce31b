"""The tokenizer: text to token ids and back, as the checkpoint's own files say."""

import operator
from pathlib import Path

import numpy as np
from tokenizers import decoders

from keras_qwen.tokenizer import files as tokenizer_files
from keras_qwen.tokenizer.byte_level import train_byte_level_bpe
from keras_qwen.tokenizer.chat_template import CHATML, render_chat_template
from keras_qwen.tokenizer.padding import pad_rows

# Options of transformers' apply_chat_template that would otherwise pass for template variables and do nothing.
_NOT_VARIABLES = frozenset(
    "chat_template continue_final_message max_length padding return_assistant_tokens_mask return_dict return_tensors "
    "tokenizer_kwargs truncation".split()
)


class QwenTokenizer:
    """Qwen's byte-level BPE tokenizer with its special tokens and chat template.

    Usually made by `from_pretrained`, or by `train`.  It needs no backend, and can be pickled.

    Args:
        tokenizer: a byte-level `tokenizers.Tokenizer`.
        chat_template: jinja text, or None.
        bos_token: token that starts a text, or None.
        eos_token: token that ends a reply, or None.
        pad_token: token that fills rows of a batch, or None.
        unk_token: token for the unknown; only chat templates see it.

    Raises:
        ValueError: the tokenizer is not byte-level, or one of the tokens is not in its vocabulary.

    Example:
        >>> tokenizer = kq.QwenTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B-Instruct")
        >>> tokenizer.decode(tokenizer.encode("Hello, world!"))
        'Hello, world!'

    Reference:
        Qwen2 technical report, section 2.1 (arXiv:2407.10671).
    """

    def __init__(
        self, tokenizer, *, chat_template=None, bos_token=None, eos_token=None, pad_token=None, unk_token=None
    ):
        if not isinstance(tokenizer.decoder, decoders.ByteLevel):
            decoder = type(tokenizer.decoder).__name__
            raise ValueError(f"Qwen's tokenizers are byte-level BPE; this one decodes with {decoder}")
        self._tokenizer = tokenizer
        self._files = None
        names = dict(bos_token=bos_token, eos_token=eos_token, pad_token=pad_token, unk_token=unk_token)
        for name, token in names.items():
            if token is not None and tokenizer.token_to_id(token) is None:
                raise ValueError(f"{name} {token!r} is not in the vocabulary: add it there, or name another token")
        self._special_tokens = names
        self.chat_template = chat_template

    @classmethod
    def from_pretrained(cls, source, *, revision=None, token=None, cache_dir=None, local_files_only=False):
        """Read a tokenizer from a folder or the Hugging Face Hub.

        Args:
            source: path of a folder with tokenizer.json, or with vocab.json and merges.txt; or a Hub repository's id.
            revision: branch, tag or commit on the Hub.
            token: access token for the Hub.
            cache_dir: where downloads are kept.
            local_files_only: whether to use only what was downloaded before.

        Returns:
            A `QwenTokenizer`.

        Raises:
            OSError: there is no tokenizer at the source, or it cannot be downloaded.
            ValueError: a file is not valid; names it.

        Example:
            >>> tokenizer = kq.QwenTokenizer.from_pretrained("Qwen/Qwen3-0.6B", local_files_only=True)
        """
        folder = Path(source)
        if not folder.is_dir():
            from keras_qwen.checkpoint import hub

            folder = hub.resolve(
                source,
                what="tokenizer",
                revision=revision,
                token=token,
                cache_dir=cache_dir,
                local_files_only=local_files_only,
            )
        files = tokenizer_files.read_files(folder)
        try:
            special = tokenizer_files.special_tokens(files)
            self = cls(tokenizer_files.build_tokenizer(files), **special)
            self._chat_templates = tokenizer_files.chat_templates(files)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from error
        self._files = files
        return self

    @classmethod
    def train(cls, texts, vocab_size, *, chat_template=CHATML):
        """Train a small tokenizer on texts, cut as Qwen's are, for tests, demonstrations and models from scratch.

        Args:
            texts: iterable of str.
            vocab_size: ids to make at most, those of <|endoftext|>, <|im_start|> and <|im_end|> included.
            chat_template: jinja text; plain ChatML by default.

        Returns:
            A `QwenTokenizer`.

        Raises:
            ValueError: vocab_size leaves no room for the 256 bytes and the special tokens.

        Example:
            >>> tokenizer = kq.QwenTokenizer.train(["The sun warms the sea."], vocab_size=300)
        """
        special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
        tokenizer = train_byte_level_bpe(texts, vocab_size, special)
        return cls(tokenizer, chat_template=chat_template, eos_token="<|im_end|>", pad_token="<|endoftext|>")

    def encode(self, text, add_special_tokens=True):
        """Turn text into token ids.

        Args:
            text: a str, or a list of str.
            add_special_tokens: whether to add what the tokenizer puts around a text: nothing in Qwen's own, a token
                that begins the text in DeepSeek-R1-Distill-Qwen.

        Returns:
            A list of ids, or a list of such lists.

        Raises:
            ValueError: text is something else, or not valid Unicode (lone surrogates).
        """
        texts = [text] if isinstance(text, str) else text
        if not isinstance(texts, list | tuple) or not all(isinstance(t, str) for t in texts):
            raise ValueError(f"encode takes a str or a list of str, not {type(text).__name__} {str(text)[:40]!r}")
        rows = [encoding.ids for encoding in self._encode(texts, add_special_tokens)]
        return rows[0] if isinstance(text, str) else rows

    def encode_with_offsets(self, text):
        """Turn one text into token ids, and say where in the text each of them comes from.

        Args:
            text: a str; nothing is added to it.

        Returns:
            The list of ids, and a list of (start, end) positions.  Tokens that share a character share its position.
        """
        (encoding,) = self._encode([text], add_special_tokens=False)
        spans, reached = [], 0
        for start, end in encoding.offsets:
            # Some tokenizers leave a token's leading spaces out of its offsets.
            spans.append((min(start, reached), end))
            reached = max(reached, end)
        return encoding.ids, spans

    def encode_batch(self, texts, *, length=None, padding_side="right", truncation=None, add_special_tokens=True):
        """Turn texts into one array, a row each.

        Args:
            texts: list of str.
            length: tokens in a row; by default as many as the longest text has.
            padding_side: "right" for training, "left" for prompts.
            truncation: which side of a text longer than `length` to cut off: "right", "left", or None to raise.
            add_special_tokens: as in `encode`.

        Returns:
            Dict of `token_ids` and `padding_mask` (1 = real token), int32 arrays of shape (batch, length).

        Raises:
            ValueError: no texts, a text longer than length, or no padding token.

        Example:
            >>> tokenizer.encode_batch(["Hi", "Hello there"], padding_side="left")["padding_mask"]
            array([[0, 1],
                   [1, 1]], dtype=int32)
        """
        if isinstance(texts, str) or not len(texts):
            raise ValueError("encode_batch takes a list of at least one text")
        return pad_rows(
            self.encode(texts, add_special_tokens),
            self.pad_token_id,
            length=length,
            padding_side=padding_side,
            truncation=truncation,
        )

    def decode(self, ids, skip_special_tokens=False):
        """Turn token ids into text.

        Args:
            ids: list or array of ids, or several of them.  Ids beyond the vocabulary (a model's embedding may have
                more rows than the tokenizer tokens) decode to nothing.
            skip_special_tokens: whether to leave out <|im_end|> and the like.

        Returns:
            A str, or a list of str for several.

        Raises:
            ValueError: an id is negative or no integer.
        """
        if not isinstance(ids, list | tuple):
            ids = np.asarray(ids).tolist()
        ids = [ids] if isinstance(ids, int) else ids
        if any(hasattr(i, "__len__") and not isinstance(i, str) for i in ids):
            return [self.decode(row, skip_special_tokens) for row in ids]
        try:
            return self._tokenizer.decode([operator.index(i) for i in ids], skip_special_tokens=skip_special_tokens)
        except (TypeError, OverflowError) as error:
            raise ValueError(f"token ids must be integers from 0 on; drop labels of -100 first ({error})") from error

    def normalize(self, text):
        """Return text in the form in which it is encoded, and so comes back from `decode`: for Qwen, Unicode's NFC."""
        normalizer = self._tokenizer.normalizer
        return text if normalizer is None else normalizer.normalize_str(text)

    def apply_chat_template(
        self, messages, tools=None, add_generation_prompt=False, tokenize=True, **template_variables
    ):
        """Render a chat as the model was trained to read it.

        Args:
            messages: list of dicts with `role`, `content`, and what the template reads besides (`tool_calls`,
                `reasoning_content`).
            tools: list of JSON schemas of the functions that the assistant may call.
            add_generation_prompt: whether to end with what precedes the assistant's reply.
            tokenize: whether to return token ids or text.
            **template_variables: what the template reads, such as `enable_thinking=False` in Qwen3's.

        Returns:
            A list of token ids, or a str.

        Raises:
            ValueError: there is no template, it refuses the chat or tries to leave its sandbox, or a message is not
                one; names the message.

        Example:
            >>> tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
            '<|im_start|>user\\nHi<|im_end|>\\n'
        """
        options = sorted(_NOT_VARIABLES & template_variables.keys())
        if options:
            raise ValueError(f"apply_chat_template has no option {', '.join(options)}; it would be dropped")
        text = render_chat_template(
            self._choose_template(tools),
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            variables={name: token for name, token in self._special_tokens.items() if token} | template_variables,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    @property
    def chat_template(self):
        """The chat template, jinja text; may be replaced, and is None if there is none."""
        return self._chat_templates.get("default")

    @chat_template.setter
    def chat_template(self, template):
        if not isinstance(template, str | None):
            raise ValueError(f"chat_template must be jinja text (str) or None, not {type(template).__name__}")
        self._chat_templates = {} if template is None else {"default": template}

    @property
    def vocab_size(self):
        """How many tokens there are, added ones included."""
        return self._tokenizer.get_vocab_size()

    @property
    def bos_token_id(self):
        """Id of the token that starts a text, or None."""
        return self.token_to_id(self._special_tokens["bos_token"])

    @property
    def eos_token_id(self):
        """Id of the token that ends a reply, or None."""
        return self.token_to_id(self._special_tokens["eos_token"])

    @property
    def pad_token_id(self):
        """Id of the token that fills rows of a batch, or None."""
        return self.token_to_id(self._special_tokens["pad_token"])

    @property
    def special_token_ids(self):
        """Ids of the tokens that `decode(..., skip_special_tokens=True)` leaves out, in order."""
        return sorted(i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special)

    def token_to_id(self, token):
        """Return a token's id, or None if there is no such token."""
        return None if token is None else self._tokenizer.token_to_id(token)

    def id_to_token(self, token_id):
        """Return the token that has an id, as the vocabulary writes it, or None."""
        return self._tokenizer.id_to_token(token_id) if 0 <= token_id < 2**32 else None

    def files(self):
        """Return what `save_pretrained` writes: dict of file name to bytes.

        Files that were read are returned as they were, but for a chat template that has been replaced since.
        """
        if self._files is None:
            return tokenizer_files.new_files(self._tokenizer, self._special_tokens, self.chat_template)
        if self._chat_templates == tokenizer_files.chat_templates(self._files):
            return dict(self._files)
        return tokenizer_files.with_chat_template(self._files, self.chat_template)

    def save_pretrained(self, folder):
        """Write the tokenizer's files, in the form that transformers, vLLM and `from_pretrained` read.

        Args:
            folder: path of the folder; made if missing.  Tokenizer files of another tokenizer there are removed.

        Raises:
            OSError: the folder cannot be written.
        """
        tokenizer_files.write_files(folder, self.files())

    def __repr__(self):
        named = ", ".join(f"{name}={token!r}" for name, token in self._special_tokens.items() if token)
        return f"<QwenTokenizer vocab_size={self.vocab_size}, {named}>"

    def _encode(self, texts, add_special_tokens):
        try:
            return self._tokenizer.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        except TypeError as error:
            raise ValueError(f"text is not valid Unicode, it has lone surrogates ({error})") from error

    def _choose_template(self, tools):
        template = self.chat_template
        if tools is not None:
            template = self._chat_templates.get("tool_use", template)
        if template is None:
            raise ValueError(
                "this tokenizer has no chat template: set tokenizer.chat_template to jinja text, such as another "
                f"Qwen tokenizer's (templates it has: {', '.join(self._chat_templates) or 'none'})"
            )
        return template
