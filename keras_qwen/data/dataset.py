"""ChatDataset and PreferenceDataset: documents in, batches for `fit` out, packed or in buckets of similar length."""

import hashlib
import json

import numpy as np

from keras_qwen.data.encoding import Encoder
from keras_qwen.data.examples import fill_rows
from keras_qwen.data.packing import PACKING
from keras_qwen.data.pieces import TOO_LONG
from keras_qwen.data.plan import Plan
from keras_qwen.data.position import check_state, global_number
from keras_qwen.data.settings import bucket_lengths_of, check_choice, check_count
from keras_qwen.data.sources import open_source
from keras_qwen.data.store import encode_source
from keras_qwen.keras_private import DataAdapter


class ChatDataset(DataAdapter):
    """Chats and raw texts as batches for `fit`, on every backend: encoded, shuffled, packed, in the order of a seed.

    `source` is the path of a .jsonl, .json, .parquet or .txt file, a glob pattern, a list of paths, a list of dicts, or
    a Hugging Face `datasets.Dataset`. Each record is one of

    - `{"messages": [{"role": ..., "content": ...}, ...]}`, with `tools` and `chat_template_kwargs` if need be;
    - `{"conversations": [{"from": "human", "value": ...}, ...]}`, ShareGPT's form;
    - `{"prompt": ..., "completion": ...}`, texts or lists of messages;
    - `{"text": ...}`, raw text for continued pre-training, as a .txt file is: every token is trained on, and
      <|endoftext|> ends the document.

    Of a chat, the assistant's tokens are trained on, as `encode_chat` marks them. Every record is encoded once, at the
    beginning, into files of 5 bytes a token; batches are then made ahead of their use in a thread. All batches have
    `batch_size` rows: what is missing in the last one is rows of padding, which change neither loss nor gradient.

    Iterating gives the batches of one epoch; the next iteration is the next epoch, in another order, and one that was
    not finished begins anew. The same seed gives the same batches, whatever `workers` and `prefetch` are, and several
    hosts share the batches that one host would have.

    Args:
        source: where the documents come from.
        tokenizer: `QwenTokenizer`.
        sequence_length: positions in a row.
        batch_size: rows in a batch; with several hosts, in the batch of each.
        packing: `"best_fit"` or `"first_fit"`: documents share rows, and do not see each other (see `pack`). None: one
            document a row; batches are of similar documents, and padded to one of a few lengths.
        shuffle: whether epochs have an order of their own.
        seed: of that order.
        too_long: what becomes of documents that do not fit into a row: `"raise"`, `"split"` or `"drop"`.
        on_error: what becomes of records that cannot be used: `"raise"`, or `"skip"`, which counts them.
        workers: processes to encode in; 0 for this one alone. The script has to stand under
            `if __name__ == "__main__":`.
        prefetch: batches made ahead.
        shard_index, shard_count: which of several hosts this one is; together they make global batches of
            `batch_size * shard_count` rows. With a mesh, `distribution.data_shard_id` and `data_shard_count`.
        drop_remainder: whether to leave out rows that do not fill a batch.
        repeat: whether an iteration goes on from epoch to epoch without end; `fit` then needs `steps_per_epoch`.
        bucket_lengths: the lengths of rows without packing; by default an eighth, a quarter and half of
            `sequence_length`, and the whole.
        window: examples that are planned together.
        cache_dir: folder to keep the encoded records in, so that the next run need not encode them again.
        **template_variables: what the chat template reads, such as `enable_thinking=False`.

    Attributes:
        statistics: what is in it: documents, tokens, trained tokens, fill rate, what was skipped, split and dropped.

    Raises:
        ValueError: a record cannot be used or is too long (names file and line), there is nothing to train on, or a
            setting is not valid.
        OSError: a file cannot be read or written.

    Example:
        >>> dataset = kq.data.ChatDataset("chats/*.jsonl", tokenizer, sequence_length=2048, batch_size=8)
        >>> print(dataset.statistics)
        1,200 documents, 410,332 tokens, 250,117 of them trained on
        26 batches, 96.3% filled
        >>> model.fit(dataset, epochs=3)

    Reference:
        Ding et al., Fewer Truncations Improve Language Modeling (arXiv:2404.10830), for best-fit packing.
    """

    _preferences = False

    def __init__(
        self,
        source,
        tokenizer,
        *,
        sequence_length,
        batch_size,
        packing="best_fit",
        shuffle=True,
        seed=0,
        too_long="raise",
        on_error="raise",
        workers=0,
        prefetch=2,
        shard_index=0,
        shard_count=1,
        drop_remainder=False,
        repeat=False,
        bucket_lengths=None,
        window=16384,
        cache_dir=None,
        **template_variables,
    ):
        check_choice("packing", packing, (*PACKING, None))
        check_choice("too_long", too_long, TOO_LONG)
        check_choice("on_error", on_error, ("raise", "skip"))
        for name, value, least in (
            ("sequence_length", sequence_length, 1),
            ("batch_size", batch_size, 1),
            ("window", window, 1),
            ("shard_count", shard_count, 1),
            ("seed", seed, 0),
            ("workers", workers, 0),
            ("prefetch", prefetch, 0),
            ("shard_index", shard_index, 0),
        ):
            check_count(name, value, least)
        if shard_index >= shard_count:
            raise ValueError(f"shard_index={shard_index} has to be less than shard_count={shard_count}")
        buckets = bucket_lengths_of(bucket_lengths, sequence_length, packing)
        self.batch_size_of_rows = batch_size * (2 if self._preferences else 1)
        self._packing, self._sequence_length, self._prefetch, self._repeat = packing, sequence_length, prefetch, repeat
        self.shard_count = shard_count
        self._static_length = packing is not None or len(buckets) == 1
        pad = tokenizer.pad_token_id
        self._pad_token_id = 0 if pad is None else pad
        source = open_source(source)
        encoding = dict(
            documents=source.digest(),
            tokenizer=_digest(tokenizer.files()),
            chat_template=_digest(tokenizer.chat_template),
            sequence_length=sequence_length,
            too_long=too_long,
            on_error=on_error,
            template_variables=template_variables,
            kind=type(self).__name__,
        )
        encoder = Encoder(tokenizer, sequence_length, too_long, on_error, template_variables, self._preferences)
        self._store, self._folder = encode_source(source, encoder, workers, cache_dir, _digest(encoding))
        self.statistics = self._store.statistics
        if not len(self._store):
            raise ValueError(f"{source.name} holds nothing to train on:\n{self.statistics}")
        order = dict(
            packing=packing,
            bucket_lengths=buckets,
            shuffle=shuffle,
            seed=seed,
            window=window,
            drop_remainder=drop_remainder,
        )
        lengths = self._store.lengths()
        self._plan = Plan(
            lengths.max(axis=1),
            sequence_length=sequence_length,
            batch_size=batch_size,
            shard_index=shard_index,
            shard_count=shard_count,
            **order,
        )
        if not len(self):
            raise ValueError(
                f"{source.name} does not fill one batch of {batch_size * shard_count} rows: choose a smaller "
                "batch_size, or drop_remainder=False, which fills it up with padding"
            )
        self.statistics.batches = len(self)
        self.statistics.fill_rate = self._plan.fill_rate(lengths.sum(axis=1)) / self._store.documents_per_example
        self._fingerprint = {**encoding, **order, "records": len(source), "global_batch_size": batch_size * shard_count}
        self._begun = self._number = self._handed_out = 0  # batches, counted from the first of epoch 0
        self._idle = None

    def __len__(self):
        """The batches of an epoch."""
        return self._plan.batches_per_epoch

    def __iter__(self):
        """The batches `(inputs, labels, loss_weights)` of the epoch, numpy arrays; see `pack` for what they hold."""
        return self._batches(self._number)

    def _batches(self, number):
        from keras_qwen.data.stream import Stream  # late: grain takes a second to import

        stream, self._idle = self._idle, None
        if stream is not None and stream.number != number:
            stream.close()
            stream = None
        stream = stream or Stream(self._make, number, self._prefetch)
        try:
            ends = False
            while not ends:
                batch = next(stream)
                number += 1
                ends = not self._repeat and number % len(self) == 0
                if ends:  # before the batch is handed out: who counts batches does not ask for another one
                    self._number, self._idle, stream = number, stream, None
                self._handed_out = number
                yield batch
        finally:
            if stream is not None:
                stream.close()

    def _make(self, number):
        rows, length = self._plan.batch(*divmod(int(number), len(self)))
        documents = []
        for row in rows:
            examples = [self._store[i] for i in row]
            kinds = range(self._store.documents_per_example)
            documents += [[example[kind] for example in examples] for kind in kinds]
        return fill_rows(documents, length, self._pad_token_id, packed=self._packing is not None)

    # position --------------------------------------------------------------------------------------------------------

    def fingerprint(self):
        """What the batches depend on: digests of documents, tokenizer and template, and the settings; a dict."""
        return json.loads(json.dumps(self._fingerprint, default=str))

    def get_state(self, batches=None):
        """The position, to be saved and given to `set_state` later.

        Args:
            batches: how many batches have been used since the position was last set, or since the beginning. By
                default, as many as have been handed out, which `fit` may be ahead of.

        Returns:
            A dict that JSON can hold: `epoch`, `batch` in it, and the `fingerprint`.
        """
        number = self._handed_out if batches is None else self._begun + batches
        epoch, batch = divmod(number, len(self))
        return {"epoch": epoch, "batch": batch, "fingerprint": self.fingerprint()}

    def set_state(self, state):
        """Let the next iteration begin at a position; it ends where the epoch does.

        Args:
            state: of `get_state`.

        Raises:
            ValueError: the documents, the tokenizer or a setting are not those of the state; says which.
        """
        check_state(state, self.fingerprint())
        self.start_at(global_number(state, len(self)))

    def start_at(self, batch):
        """Let the next iteration begin at a batch, counted from the first of epoch 0.

        Args:
            batch: its number.
        """
        check_count("batch", batch, 0)
        self._begun = self._number = self._handed_out = batch

    # what Keras asks of data ------------------------------------------------------------------------------------------

    @property
    def num_batches(self):
        return None if self._repeat else len(self)

    @property
    def batch_size(self):
        return self.batch_size_of_rows

    has_partial_batch = False
    partial_batch_size = None

    def get_numpy_iterator(self):
        return self

    def get_jax_iterator(self):
        return self

    def get_tf_dataset(self):
        from keras_qwen.data.adapter_tensorflow import as_dataset

        return as_dataset(self, *self._signature())

    def get_torch_dataloader(self):
        from keras_qwen.data.adapter_torch import as_loader

        return as_loader(self)

    def _signature(self):
        """Structure of a batch with dtypes, and the shape of all of its arrays."""
        mask = "padding_mask" if self._packing is None else "segment_ids"
        structure = ({"token_ids": np.int32, mask: np.int32}, np.int32, np.float32)
        return structure, (self.batch_size, self._sequence_length if self._static_length else None)


class PreferenceDataset(ChatDataset):
    """Pairs of a better and a worse answer as batches for DPO: rows 2i and 2i + 1 are the chosen and the rejected one.

    Each record is `{"prompt": ..., "chosen": ..., "rejected": ...}`, texts or lists of messages, or two whole chats
    `{"chosen": [...], "rejected": [...]}` that begin alike. Loss weights mark the answer's tokens, none of the prompt.
    There is one document a row; both of a pair have the length of the longer one.

    Args:
        source, tokenizer, sequence_length: as of `ChatDataset`.
        batch_size: pairs in a batch, which has twice as many rows.
        too_long: `"raise"` or `"drop"`, which leaves the pair out.
        **settings: further ones of `ChatDataset`, template variables included.

    Raises:
        ValueError, OSError: as `ChatDataset`.

    Example:
        >>> pairs = kq.data.PreferenceDataset("pairs.jsonl", tokenizer, sequence_length=1024, batch_size=4)
        >>> inputs, labels, loss_weights = next(iter(pairs))
        >>> inputs["token_ids"].shape
        (8, 1024)

    Reference:
        Rafailov et al., Direct Preference Optimization (arXiv:2305.18290).
    """

    _preferences = True

    def __init__(self, source, tokenizer, *, sequence_length, batch_size, too_long="raise", **settings):
        check_choice("too_long", too_long, ("raise", "drop"))
        if settings.pop("packing", None) is not None:
            raise ValueError("pairs are not packed: leave out packing")
        super().__init__(
            source,
            tokenizer,
            sequence_length=sequence_length,
            batch_size=batch_size,
            packing=None,
            too_long=too_long,
            **settings,
        )


def _digest(value):
    """A short digest of texts, bytes and settings."""
    text = json.dumps(value, sort_keys=True, default=lambda v: v.hex() if isinstance(v, bytes) else str(v))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
