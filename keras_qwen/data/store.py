"""Token ids of all examples in files, mapped into memory: every record is encoded once, and nothing held in memory."""

import json
from array import array
from dataclasses import asdict
from pathlib import Path

import numpy as np

from keras_qwen.checkpoint.replacing import replaced_folder
from keras_qwen.data.encoding import Encoded
from keras_qwen.data.statistics import Statistics
from keras_qwen.data.temporary import TemporaryFolder

_CHUNK = 32  # records that a worker encodes at a time


class TokenStore:
    """Encoded examples, read by position.

    Args:
        folder: path of the folder that `encode_source` wrote.
    """

    def __init__(self, folder):
        facts = json.loads((folder / "statistics.json").read_text())
        self.documents_per_example = facts.pop("documents_per_example")
        self.statistics = Statistics(**facts)
        self._ends = np.load(folder / "ends.npy")
        self._token_ids = self._trained = None
        if len(self._ends):
            self._token_ids = np.memmap(folder / "token_ids.bin", "int32", "r")
            self._trained = np.memmap(folder / "trained.bin", "bool", "r")

    def __len__(self):
        return len(self._ends) // self.documents_per_example

    def __getitem__(self, example):
        """The documents `(token_ids, mask)` of an example: one, or a preference's two."""
        first = example * self.documents_per_example
        ends = self._ends[max(first - 1, 0) : first + self.documents_per_example]
        starts = ends if first else [0, *ends]
        spans = [slice(*span) for span in zip(starts[:-1], starts[1:], strict=True)]
        return [(self._token_ids[span], self._trained[span]) for span in spans]

    def lengths(self):
        """How many positions of a row each document of each example takes: int array (examples, documents)."""
        return (np.diff(self._ends, prepend=0) - 1).reshape(-1, self.documents_per_example)


class EncodeChunk:
    """Encodes some records of a source, here or in a worker process.

    Args:
        source: of `open_source`.
        encoder: `Encoder`.
    """

    def __init__(self, source, encoder):
        self._source, self._encoder = source, encoder

    def __len__(self):
        return -(-len(self._source) // _CHUNK)

    def __call__(self, number):
        """Few and plain values, which pass quickly from process to process: all ids, all masks, and facts as JSON."""
        first = number * _CHUNK
        records = range(first, min(first + _CHUNK, len(self._source)))
        encoded = [self._encoder(self._source, index) for index in records]
        documents = [document for one in encoded for example in one.examples for document in example]
        ids = np.concatenate([np.zeros(0, "int32"), *(ids for ids, _ in documents)])
        trained = np.concatenate([np.zeros(0, "bool"), *(mask for _, mask in documents)])
        facts = [
            ([[len(ids) for ids, _ in example] for example in one.examples], *one[1:], self._source.where(index))
            for one, index in zip(encoded, records, strict=True)
        ]
        return ids, trained, json.dumps(facts)


def encode_source(source, encoder, workers, cache_dir=None, key=None):
    """Encode all records of a source into files.

    Args:
        source: of `open_source`.
        encoder: `Encoder`.
        workers: processes to encode in, 0 for this one alone.
        cache_dir: folder to keep the files in, for the next run; by default they are temporary.
        key: name of the files there: whatever has another one is encoded anew.

    Returns:
        A `TokenStore`, and what holds its temporary folder, or None.

    Raises:
        ValueError: a record cannot be used (see `Encoder`).
        OSError: the files cannot be written.
    """
    if cache_dir is None:
        holder = TemporaryFolder()
        _write(holder.path, source, encoder, workers)
        return TokenStore(holder.path), holder
    folder = Path(cache_dir) / key
    if not folder.is_dir():
        with replaced_folder(folder, stale=lambda name: True) as unfinished:
            _write(unfinished, source, encoder, workers)
    return TokenStore(folder), None


def _write(folder, source, encoder, workers):
    statistics, ends = Statistics(), array("q")
    with (folder / "token_ids.bin").open("wb") as ids_file, (folder / "trained.bin").open("wb") as trained_file:
        for ids, trained, facts in _chunks(EncodeChunk(source, encoder), workers):
            ids.tofile(ids_file)
            trained.tofile(trained_file)
            start = 0
            for sizes, problem, split, dropped, where in json.loads(facts):
                examples = []
                for example in sizes:
                    documents = []
                    for size in example:
                        documents.append((ids[start : start + size], trained[start : start + size]))
                        ends.append((ends[-1] if ends else 0) + size)
                        start += size
                    examples.append(documents)
                statistics.add(Encoded(examples, problem, split, dropped), where)
    np.save(folder / "ends.npy", np.array(ends, "int64"))
    facts = {**asdict(statistics), "documents_per_example": 2 if encoder.preferences else 1}
    (folder / "statistics.json").write_text(json.dumps(facts))


def _chunks(encode, workers):
    if not workers:
        return map(encode, range(len(encode)))
    from keras_qwen.data.stream import map_in_processes

    return map_in_processes(encode, len(encode), workers)
