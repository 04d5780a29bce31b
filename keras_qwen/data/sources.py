"""Where records come from: files, tables, `datasets` objects and lists, read by position and not held in memory.

A source has a length, gives the record at a position as a dict, says where that record stands, and has a digest of its
content.
"""

import glob
import hashlib
import json
from array import array
from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path

import numpy as np

from keras_qwen.data.reading import parse_json

_TEXT_BLOCK = 1 << 16  # a .txt file is tokenised in blocks of about this many bytes, cut at line ends
_SAMPLED = 1000  # records that the digest of a sequence looks at, if it is not a list


def open_source(source):
    """Open what documents can be read from.

    Args:
        source: path of a .jsonl, .json, .parquet or .txt file, or a glob pattern; a list of such; a list of records
            (dicts); or anything else with a length and records by position, as a Hugging Face `datasets.Dataset`.

    Returns:
        The source, opened.

    Raises:
        FileNotFoundError: there is no such file, or a pattern matches none.
        ValueError: nothing can be read from it, or there is no record in it.

    Example:
        >>> source = open_source("chats/*.jsonl")
        >>> len(source), source[0]["messages"][0]["role"], source.where(0)
        (120, 'user', 'chats/a.jsonl, line 1')
    """
    if isinstance(source, str | Path):
        opened = _open_paths([source])
    elif isinstance(source, list | tuple) and source and all(isinstance(item, str | Path) for item in source):
        opened = _open_paths(source)
    elif isinstance(source, Mapping):
        raise ValueError(f"a dict of splits is not one source: choose one of {', '.join(map(repr, source))}")
    elif hasattr(source, "__len__") and hasattr(source, "__getitem__"):
        opened = Records(source)
    else:
        raise ValueError(
            f"a {type(source).__name__} has no length or cannot be read by position, so that it cannot be shuffled or "
            "resumed: write it to a .jsonl or .parquet file first"
        )
    if not len(opened):
        raise ValueError(
            f"{opened.name} holds no record; put one JSON object on each line, or a dict for each document"
        )
    return opened


class Records:
    """Records in a list, or in anything else with a length and positions.

    Args:
        sequence: the list.
        name: what messages call it.
    """

    def __init__(self, sequence, name="source"):
        self._sequence, self.name = sequence, name

    def __len__(self):
        return len(self._sequence)

    def __getitem__(self, index):
        return self._sequence[index]

    def where(self, index):
        return f"{self.name}[{index}]"

    def digest(self):
        own = getattr(self._sequence, "_fingerprint", None)  # of a `datasets.Dataset`
        if isinstance(own, str):
            return own
        digest, count = hashlib.blake2b(digest_size=8), len(self._sequence)
        step = 1 if isinstance(self._sequence, list | tuple) else -(-count // _SAMPLED)
        for index in range(0, count, step):
            digest.update(json.dumps(self._sequence[index], sort_keys=True, default=str).encode())
        return digest.hexdigest()


class JsonLines:
    """A .jsonl file: one JSON object a line. Where each line begins is kept, 16 bytes a line.

    Args:
        path: the file. Blank lines are passed over.
    """

    def __init__(self, path):
        self.name = str(path)
        offsets, numbers, position, digest = array("q"), array("q"), 0, hashlib.blake2b(digest_size=8)
        with open(path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    offsets.append(position)
                    numbers.append(number)
                position += len(line)
                digest.update(line)
        self._offsets, self._numbers, self._digest = np.array(offsets), np.array(numbers), digest.hexdigest()

    def __len__(self):
        return len(self._offsets)

    def __getitem__(self, index):
        with open(self.name, "rb") as file:
            file.seek(self._offsets[index])
            return parse_json(file.readline())

    def where(self, index):
        return f"{self.name}, line {self._numbers[index]}"

    def digest(self):
        return self._digest


class TextFile:
    """A .txt file: one document of raw text, given in blocks that end where a line ends.

    Args:
        path: the file, UTF-8.
    """

    def __init__(self, path):
        self.name = str(path)
        self._ends, position, digest = array("q"), 0, hashlib.blake2b(digest_size=8)
        with open(path, "rb") as lines:
            for line in lines:
                position += len(line)
                digest.update(line)
                if position - (self._ends[-1] if self._ends else 0) >= _TEXT_BLOCK:
                    self._ends.append(position)
        if position > (self._ends[-1] if self._ends else 0):
            self._ends.append(position)
        self._digest = digest.hexdigest()

    def __len__(self):
        return len(self._ends)

    def __getitem__(self, index):
        start = self._ends[index - 1] if index else 0
        with open(self.name, "rb") as file:
            file.seek(start)
            block = file.read(self._ends[index] - start)
        try:
            return {"text": block.decode("utf-8"), "text_goes_on": index + 1 < len(self)}
        except UnicodeDecodeError as error:
            raise ValueError(f"not UTF-8 ({error.reason}); save the file as UTF-8") from error

    def where(self, index):
        return f"{self.name}, from byte {self._ends[index - 1] if index else 0} on"

    def digest(self):
        return self._digest


class Joined:
    """Several sources, one after the other."""

    def __init__(self, sources):
        self._sources = sources
        self._ends = list(accumulate(map(len, sources)))
        self.name = f"{sources[0].name} and {len(sources) - 1} more"

    def __len__(self):
        return self._ends[-1]

    def _find(self, index):
        number = bisect_right(self._ends, index)
        return self._sources[number], index - (self._ends[number - 1] if number else 0)

    def __getitem__(self, index):
        source, index = self._find(index)
        return source[index]

    def where(self, index):
        source, index = self._find(index)
        return source.where(index)

    def digest(self):
        digests = " ".join(source.digest() for source in self._sources)
        return hashlib.blake2b(digests.encode(), digest_size=8).hexdigest()


def _open_paths(paths):
    files = [file for path in paths for file in _matching(str(path))]
    sources = [_open_file(Path(file)) for file in files]
    return sources[0] if len(sources) == 1 else Joined(sources)


def _matching(path):
    if Path(path).is_file():
        return [path]
    if Path(path).is_dir():
        raise ValueError(f"{path} is a folder: name its files, or a pattern such as {path.rstrip('/')}/*.jsonl")
    files = sorted(file for file in glob.glob(path, recursive=True) if Path(file).is_file())
    if not files:
        kind = "no file matches the pattern" if glob.has_magic(path) else "there is no file"
        raise FileNotFoundError(f"{kind} {path}")
    return files


def _open_file(path):
    kind = path.suffix.lower()
    if kind in (".jsonl", ".ndjson"):
        return JsonLines(path)
    if kind == ".json":
        records = parse_json(path.read_bytes(), f"{path}: ")
        if not isinstance(records, list):
            raise ValueError(f"{path}: a .json file holds a list of records; one object a line is .jsonl")
        return Records(records, str(path))
    if kind == ".txt":
        return TextFile(path)
    if kind == ".parquet":
        from keras_qwen.data.parquet import Parquet

        return Parquet(path)
    raise ValueError(f"{path}: documents are read from .jsonl, .json, .parquet and .txt files, not {kind or 'this'}")
