"""Reading and writing safetensors files in pieces, so that no second copy of a tensor is ever in memory.

The format (https://huggingface.co/docs/safetensors): eight bytes with the header's length, little-endian; a JSON
object {name: {"dtype", "shape", "data_offsets"}}; then the tensors' bytes, without gaps.
"""

import dataclasses
import functools
import json
import math
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np

from keras_qwen.checkpoint.file_names import INDEX_NAME, WEIGHTS_NAME

DTYPES = {"F32": np.dtype("float32"), "F16": np.dtype("float16"), "BF16": np.dtype(ml_dtypes.bfloat16)}
# What a training state holds besides: counters, seeds, moments of 8 bits.
STATE_DTYPES = DTYPES | {
    code: np.dtype(name)
    for code, name in dict(
        F64="float64", I8="int8", U8="uint8", I16="int16", U16="uint16", I32="int32", U32="uint32", I64="int64",
        U64="uint64", BOOL="bool",
    ).items()
}  # fmt: skip
CODES = {dtype: code for code, dtype in STATE_DTYPES.items()}
_BLOCK_BYTES = 1 << 19  # read and converted at a time: small enough for the cache
_PAGE_BYTES = 1 << 12  # what a disk reads at least
_PARALLEL_BYTES = 8 << 20  # tensors from this size on are read by several threads


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: file, name, dtype, shape, and the offset of its first byte."""

    file: Path
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read_into(self, target, *, check_finite=False):
        """Fills `target`, converting to its dtype; a strided view (a transposed array, say) will do.

        Args:
            target: writable array of the tensor's shape.
            check_finite: whether NaN and infinity are errors.

        Raises:
            OSError: if the file ends early.
            ValueError: for values that are not finite.
        """
        if tuple(target.shape) != self.shape:
            raise ValueError(f"{self.name} in {self.file} has shape {self.shape}, asked for as {target.shape}.")
        self.read_parts([(tuple(slice(0, size) for size in self.shape), target)], check_finite=check_finite)

    def read_parts(self, parts, *, check_finite=False):
        """Fills several arrays with parts of the tensor; what lies elsewhere is not read.

        Args:
            parts: list of `(index, target)`: a tuple of slices, one for each dimension, from a beginning to an end, and
                a writable array of that part's shape; all of one dtype. Where they share rows, the rows of any two are
                the same, as those of a mesh are.
            check_finite: as of `read_into`.

        Raises:
            OSError, ValueError: as of `read_into`.
        """
        if not self.shape:
            parts = [((slice(0, 1),), target.reshape(1)) for _, target in parts]
        by_rows = {}
        for (rows, *index), target in parts:
            by_rows.setdefault((rows.start, rows.stop), []).append((index, target))
        with open(self.file, "rb") as file:
            copies = [
                copy
                for (start, stop), group in by_rows.items()
                for copy in self._copies(file, start, stop, group, check_finite)
            ]
            if sum(target.size for _, target in parts) * self.dtype.itemsize < _PARALLEL_BYTES:
                for copy in copies:
                    copy()
            else:
                with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
                    list(pool.map(lambda copy: copy(), copies))

    def _copies(self, file, start, stop, group, check_finite):
        """Functions that each copy a block of the rows from `start` to `stop` into the targets of a group."""
        _, *inner = self.shape or (1,)
        first, last = 0, 1  # of the columns that are read: the second dimension, with all that lies behind
        if inner:
            first, last = min(index[0].start for index, _ in group), max(index[0].stop for index, _ in group)
            column_bytes = math.prod(inner[1:]) * self.dtype.itemsize
            if (inner[0] - (last - first)) * column_bytes < _PAGE_BYTES:  # a disk would read what lies between, too
                first, last = 0, inner[0]
            inner[0] = last - first
            group = [((slice(i.start - first, i.stop - first), *rest), target) for (i, *rest), target in group]
        step = max(1, _BLOCK_BYTES // max(math.prod(inner) * self.dtype.itemsize, 1))

        def copy(begin):
            end = min(begin + step, stop)
            block = np.empty((end - begin, *inner), self.dtype)
            self._read_rows(file, begin, first, block)
            block = block.astype(group[0][1].dtype, copy=False)
            if check_finite and not np.isfinite(block.astype("float32", copy=False)).all():
                raise ValueError(f"Tensor {self.name} in {self.file} holds NaN or infinity.")
            for index, target in group:
                target[begin - start : end - start] = block[(slice(None), *index)]

        return [functools.partial(copy, begin) for begin in range(start, stop, step)]

    def _read_rows(self, file, begin, first, block):
        """Fills a block with rows from `begin` on, of each the columns from `first` on."""
        view = memoryview(block.reshape(-1).view(np.uint8))
        row_bytes = self.nbytes // max((self.shape or (1,))[0], 1)
        wanted = len(view) // max(len(block), 1)
        offset = self.offset + begin * row_bytes
        if wanted == row_bytes:
            pieces = [(view, offset)]
        else:
            offset += first * (wanted // max(block.shape[1], 1))
            pieces = [(view[i * wanted : (i + 1) * wanted], offset + i * row_bytes) for i in range(len(block))]
        for piece, at in pieces:
            if _read_at(file.fileno(), piece, at) != len(piece):
                raise OSError(f"{self.file} ends within tensor {self.name}. Fetch the file again.")

    def rows(self, start, stop):
        """Some of its rows, from `start` to `stop`, as a tensor of their own."""
        row_bytes = self.nbytes // max(self.shape[0], 1)
        offset = self.offset + start * row_bytes
        return dataclasses.replace(self, shape=(stop - start, *self.shape[1:]), offset=offset)

    def equals(self, other: "StoredTensor") -> bool:
        """Whether both hold the same values."""
        if self.shape != other.shape:
            return False
        rows = self.shape[0] if self.shape else 1
        step = max(1, _PARALLEL_BYTES // max(1, self.nbytes // max(1, rows))) if self.shape else 1
        for start in range(0, rows, step):
            mine, theirs = (
                tensor.rows(start, min(start + step, rows)) if self.shape else tensor for tensor in (self, other)
            )
            values = np.empty((2, *mine.shape), "float32")
            mine.read_into(values[0]), theirs.read_into(values[1])
            if not np.array_equal(*values):
                return False
        return True


def _read_at(descriptor, view, offset):
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def read_header(path: str | Path, dtypes=DTYPES) -> dict[str, StoredTensor]:
    """Reads and checks the header of one safetensors file.

    Args:
        path: the file.
        dtypes: {code: dtype} of what may be in it, those of checkpoints by default.

    Raises:
        OSError: if the file is missing, truncated or no safetensors file; the message names it.
        ValueError: for a dtype this package does not load.
    """
    path = Path(path)
    size = path.stat().st_size
    with open(path, "rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > size - 8:
            raise OSError(
                f"{path} has {size} bytes, its header should have {length}: truncated, or no safetensors file. "
                f"Fetch it again."
            )
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            entries = {n: (str(e["dtype"]), tuple(e["shape"]), *map(int, e["data_offsets"])) for n, e in header.items()}
        except (ValueError, TypeError, KeyError, AttributeError) as problem:
            raise OSError(f"{path} has no valid safetensors header: {problem!r}. Fetch it again.") from problem
    tensors, expected = {}, 0
    for name, (code, shape, begin, end) in sorted(entries.items(), key=lambda item: (item[1][2], item[1][3])):
        if code not in dtypes:
            raise ValueError(f"Tensor {name} in {path} has dtype {code}; keras_qwen loads {', '.join(dtypes)}.")
        tensor = StoredTensor(path, name, dtypes[code], shape, 8 + length + begin)
        if begin != expected or end - begin != tensor.nbytes:
            raise OSError(f"{path} says tensor {name} {shape} lies at bytes {begin} to {end}: its header is damaged.")
        tensors[name], expected = tensor, end
    if 8 + length + expected != size:
        raise OSError(
            f"{path} has {size} bytes, its header describes {8 + length + expected}: truncated. Fetch it again."
        )
    return tensors


def read_folder(folder: str | Path) -> dict[str, StoredTensor]:
    """All tensors of a checkpoint folder, from `model.safetensors` or the files its index names.

    Raises:
        OSError: if there are no weights, a file is missing or damaged.
        ValueError: if the index names a path, or a tensor stands in two files or in another than the index says.
    """
    folder = Path(folder)
    index = folder / INDEX_NAME
    if not index.is_file():
        if not (folder / WEIGHTS_NAME).is_file():
            found = sorted(p.name for p in folder.glob("*") if p.suffix in (".safetensors", ".bin", ".gguf", ".pt"))
            hint = f" It has {', '.join(found[:4])}; convert those to safetensors." if found else ""
            raise OSError(f"{folder} has neither {WEIGHTS_NAME} nor {INDEX_NAME}.{hint}")
        return read_header(folder / WEIGHTS_NAME)
    weight_map = read_index(index)
    tensors: dict[str, StoredTensor] = {}
    for file in sorted(set(weight_map.values())):
        if not (folder / file).is_file():
            raise OSError(f"{index} names {file}, which is not in {folder}. Fetch the checkpoint again.")
        for name, tensor in read_header(folder / file).items():
            if name in tensors:
                raise ValueError(f"Tensor {name} stands in both {tensors[name].file.name} and {file} of {folder}.")
            tensors[name] = tensor
    for name, file in weight_map.items():
        if name not in tensors or tensors[name].file.name != file:
            raise ValueError(f"{index} says tensor {name} is in {file}, but it is not there.")
    return tensors


def read_index(path: str | Path) -> dict[str, str]:
    """The `weight_map` of an index file: {tensor name: file name}; file names that are paths are refused."""
    try:
        weight_map = json.loads(Path(path).read_text(encoding="utf-8"))["weight_map"]
        items = list(weight_map.items())
    except (ValueError, KeyError, AttributeError, TypeError) as problem:
        raise ValueError(f"{path} is no index of a checkpoint: {problem!r}.") from problem
    for name, file in items:
        if not isinstance(file, str) or file in ("", ".", "..") or any(c in file for c in "/\\:\0"):
            raise ValueError(f"{path} puts tensor {name} into {file!r}: a plain file name is needed, not a path.")
    return dict(items)


def write_file(path: str | Path, tensors) -> None:
    """Writes a safetensors file tensor by tensor, and forces it to the disk.

    Args:
        path: the file; it must not exist.
        tensors: `(name, dtype, shape, load)`, where `load()` returns the array; it is called when the tensor's turn
            comes, and its result (a strided view will do) is converted and written in blocks.
    """
    header, offset = {}, 0
    for name, dtype, shape, _ in tensors:
        end = offset + math.prod(shape) * np.dtype(dtype).itemsize
        header[name] = {"dtype": CODES[np.dtype(dtype)], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data is aligned
    with open(path, "xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, dtype, shape, load in tensors:
            array = load()
            if tuple(array.shape) != tuple(shape):
                raise ValueError(f"{name} has shape {tuple(array.shape)}, announced was {tuple(shape)}.")
            rows = array if array.ndim else array[None]
            step = max(1, _BLOCK_BYTES // max(1, rows.nbytes // max(1, len(rows))))
            for start in range(0, len(rows), step):
                block = np.ascontiguousarray(rows[start : start + step]).astype(dtype, copy=False)
                file.write(block.reshape(-1).view(np.uint8))
        file.flush()
        os.fsync(file.fileno())
