"""Parquet files as a source of records; needs pyarrow, which is imported when the first file is opened."""

import hashlib
from bisect import bisect_right
from itertools import accumulate

from keras_qwen.data.temporary import TemporaryFolder


class Parquet:
    """A Parquet file. Its row groups are unpacked, one by one, to a temporary Arrow file that is mapped into memory.

    A compressed table cannot be read by position; an Arrow file can, and takes no memory for what is not looked at.

    Args:
        path: the file.

    Raises:
        ImportError: pyarrow is not installed.
        ValueError: it is not a Parquet file.
    """

    def __init__(self, path):
        try:
            import pyarrow
            from pyarrow import ipc, parquet
        except ImportError as error:
            raise ImportError(f'{path}: to read Parquet files, pip install "keras-qwen[parquet]"') from error
        self.name, self._batches = str(path), None
        self._folder = TemporaryFolder()  # removed with this object
        self._arrow = str(self._folder.path / "records.arrow")
        lengths = []
        try:
            with parquet.ParquetFile(path) as file, ipc.new_file(self._arrow, file.schema_arrow) as arrow:
                for batch in file.iter_batches():
                    arrow.write_batch(batch)
                    lengths.append(batch.num_rows)
        except pyarrow.ArrowInvalid as error:
            raise ValueError(f"{path} is not a Parquet file, or is damaged: {error}") from error
        self._ends = list(accumulate(lengths))

    def __len__(self):
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index):
        if self._batches is None:
            import pyarrow
            from pyarrow import ipc

            self._batches = ipc.open_file(pyarrow.memory_map(self._arrow))
        number = bisect_right(self._ends, index)
        row = index - (self._ends[number - 1] if number else 0)
        return self._batches.get_batch(number).slice(row, 1).to_pylist()[0]

    def where(self, index):
        return f"{self.name}, row {index + 1}"

    def digest(self):
        digest = hashlib.blake2b(digest_size=8)
        with open(self.name, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        return digest.hexdigest()

    def __getstate__(self):  # worker processes map the same file, and do not own it
        return {**self.__dict__, "_folder": None, "_batches": None}
