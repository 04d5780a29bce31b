"""Safetensors files: what is read and written is what the safetensors library reads and writes."""

import itertools
import json
import math
import os
import struct

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_qwen.checkpoint import safetensors_files
from keras_qwen.checkpoint.safetensors_files import read_folder, read_header, read_index, write_file

DTYPES = [np.dtype("float32"), np.dtype("float16"), np.dtype(ml_dtypes.bfloat16)]


def values(shape, dtype, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def read(tensor, dtype=None, **arguments):
    out = np.empty(tensor.shape, dtype or tensor.dtype)
    tensor.read_into(out, **arguments)
    return out


@pytest.fixture
def tensors():
    return {
        "a.weight": values((5, 3), "float32"),
        "b.bias": values((7,), "float16", 1),
        "c.weight": values((4, 2, 3), ml_dtypes.bfloat16, 2),
        "scalar": values((), "float32", 3),
        "empty": values((0, 4), "float32", 4),
    }


def test_reads_what_safetensors_writes(tmp_path, tensors):
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = read_folder(tmp_path)
    assert found.keys() == tensors.keys()
    for name, expected in tensors.items():
        assert (found[name].dtype, found[name].shape) == (expected.dtype, expected.shape)
        assert read(found[name]).tobytes() == expected.tobytes()


def test_safetensors_reads_what_is_written(tmp_path, tensors):
    path = tmp_path / "model.safetensors"
    write_file(path, [(n, a.dtype, a.shape, lambda a=a: a) for n, a in tensors.items()])
    with safetensors.safe_open(path, "numpy") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == tensors.keys()
        for name, expected in tensors.items():
            found = file.get_tensor(name)
            assert (found.dtype, found.shape, found.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("wanted", DTYPES)
def test_converts_and_transposes_in_one_go(tmp_path, stored, wanted, monkeypatch):
    array = values((37, 23), stored)
    write_file(tmp_path / "model.safetensors", [("w", stored, array.shape, lambda: array)])
    tensor = read_folder(tmp_path)["w"]
    for block, parallel in [(1, 1 << 30), (100, 1), (1 << 20, 1)]:  # many blocks, many blocks in threads, one block
        monkeypatch.setattr(safetensors_files, "_BLOCK_BYTES", block)
        monkeypatch.setattr(safetensors_files, "_PARALLEL_BYTES", parallel)
        target = np.empty((23, 37), wanted)
        tensor.read_into(target.T)
        assert target.tobytes() == np.ascontiguousarray(array.T).astype(wanted).tobytes()


@settings(max_examples=30)
@given(shape=st.lists(st.integers(0, 9), max_size=3).map(tuple), block=st.integers(1, 64), data=st.data())
def test_block_size_changes_nothing(tmp_path_factory, shape, block, data):
    path = tmp_path_factory.mktemp("blocks") / "model.safetensors"
    array = values(shape, data.draw(st.sampled_from(DTYPES)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors_files, "_BLOCK_BYTES", block)
        write_file(path, [("x", array.dtype, shape, lambda: array)])
        assert read(read_header(path)["x"]).tobytes() == array.tobytes()


def test_a_strided_view_is_written_as_it_reads(tmp_path):
    array = values((6, 4), "float32")
    write_file(tmp_path / "model.safetensors", [("w", "bfloat16", (4, 6), lambda: array.T)])
    expected = np.ascontiguousarray(array.T).astype(ml_dtypes.bfloat16)
    assert read(read_folder(tmp_path)["w"]).tobytes() == expected.tobytes()


def test_not_finite_values_are_found_on_request(tmp_path):
    for bad in (np.nan, np.inf):
        array = values((5, 3), ml_dtypes.bfloat16)
        array[4, 1] = bad
        path = tmp_path / f"{bad}.safetensors"
        write_file(path, [("layer.w", array.dtype, array.shape, lambda a=array: a)])
        tensor = read_header(path)["layer.w"]
        read(tensor)
        with pytest.raises(ValueError, match=rf"layer\.w in .*{bad}\.safetensors holds NaN or infinity"):
            read(tensor, check_finite=True)


def saved(tmp_path, tensors, name="model.safetensors"):
    safetensors.numpy.save_file(tensors, tmp_path / name)
    return tmp_path / name


def test_truncated_file(tmp_path, tensors):
    path = saved(tmp_path, tensors)
    data = path.read_bytes()
    for size in (len(data) - 1, 100, 5, 0):
        path.write_bytes(data[:size])
        with pytest.raises(OSError, match=r"model\.safetensors"):
            read_folder(tmp_path)


def test_file_that_shrinks_after_its_header_was_read(tmp_path, tensors):
    path = saved(tmp_path, tensors)
    found = read_folder(tmp_path)
    path.write_bytes(path.read_bytes()[:-8])
    last = max(found.values(), key=lambda t: (t.offset, t.nbytes))
    with pytest.raises(OSError, match=rf"ends within tensor {last.name}"):
        read(last)


def test_header_larger_than_the_file(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 40) + b"{}")
    with pytest.raises(OSError, match="header should have 1099511627776"):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[]",
        b'{"a": 3}',
        b'{"a": {"dtype": "F32", "shape": [1]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',  # size and shape differ
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',  # a gap
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},'
        b' "b": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',  # overlap
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}',
    ],
)
def test_damaged_header(tmp_path, header):
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(OSError, match=r"model\.safetensors"):
        read_folder(tmp_path)


def test_unknown_dtype(tmp_path):
    saved(tmp_path, {"w": np.zeros(3, "int8")})
    with pytest.raises(ValueError, match=r"Tensor w in .*model\.safetensors has dtype I8"):
        read_folder(tmp_path)


def write_index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture
def sharded(tmp_path):
    saved(tmp_path, {"a": np.zeros(1, "float32")}, "one.safetensors")
    saved(tmp_path, {"b": np.ones(1, "float32")}, "two.safetensors")
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    return tmp_path


def test_index(sharded):
    assert {n: float(read(t)[0]) for n, t in read_folder(sharded).items()} == {"a": 0.0, "b": 1.0}


def test_index_naming_a_missing_file(sharded):
    (sharded / "two.safetensors").unlink()
    with pytest.raises(OSError, match=r"names two\.safetensors, which is not in"):
        read_folder(sharded)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "sub/x", "..", ".", "", "c:x", "a\\b", 3, None])
def test_index_naming_a_path(sharded, name):
    write_index(sharded, {"a": name})
    with pytest.raises(ValueError, match="plain file name"):
        read_folder(sharded)


def test_links_in_the_folder_are_fine(sharded, tmp_path_factory):
    blobs = tmp_path_factory.mktemp("blobs")
    (sharded / "two.safetensors").rename(blobs / "hash")
    (sharded / "two.safetensors").symlink_to(blobs / "hash")
    assert float(read(read_folder(sharded)["b"])[0]) == 1.0


def test_one_tensor_in_two_files(sharded):
    saved(sharded, {"a": np.zeros(1, "float32"), "b": np.ones(1, "float32")}, "two.safetensors")
    with pytest.raises(ValueError, match=r"Tensor a stands in both one\.safetensors and two\.safetensors"):
        read_folder(sharded)


def test_index_that_is_wrong_about_a_tensor(sharded):
    write_index(sharded, {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"})
    with pytest.raises(ValueError, match="tensor c is in two.safetensors"):
        read_folder(sharded)


@pytest.mark.parametrize("text", ["{", "[]", '{"metadata": {}}', '{"weight_map": []}'])
def test_damaged_index(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match="no index of a checkpoint"):
        read_index(tmp_path / "model.safetensors.index.json")


def test_no_weights(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(OSError, match=r"neither model\.safetensors nor .*It has pytorch_model\.bin"):
        read_folder(tmp_path)


def test_equals(tmp_path):
    array = values((3, 4), "float32")
    changed = array.copy()
    changed[2, 3] += 1
    saved(tmp_path, {"a": array, "same": array, "changed": changed, "other": array[:2]})
    found = read_folder(tmp_path)
    assert found["a"].equals(found["same"])
    assert not found["a"].equals(found["changed"]) and not found["a"].equals(found["other"])


@pytest.mark.parametrize("shape", [(12, 8), (6, 3000), (8,), (4, 6, 5)])
def test_parts_are_read_once_and_nothing_else(shape, tmp_path, monkeypatch):
    stored = np.arange(math.prod(shape), dtype="float32").reshape(shape)
    write_file(tmp_path / "a.safetensors", [("x", np.dtype("float32"), shape, lambda: stored)])
    tensor = read_header(tmp_path / "a.safetensors")["x"]
    preadv, read = os.preadv, []
    monkeypatch.setattr(os, "preadv", lambda *call: read.append(len(call[1][0])) or preadv(*call))
    halves = [[slice(0, size // 2), slice(size // 2, size)] for size in shape]
    for cut in itertools.product([False, True], repeat=len(shape)):
        indices = list(
            itertools.product(*([*h] if c else [slice(0, n)] for h, c, n in zip(halves, cut, shape, strict=True)))
        )
        parts = [(index, np.zeros_like(stored[index])) for index in indices]
        del read[:]
        tensor.read_parts(parts)
        for index, target in parts:
            np.testing.assert_array_equal(target, stored[index])
        assert sum(read) == stored.nbytes
    index = (halves[0][1], *([halves[1][1]] if len(shape) > 1 else []), *[slice(0, n) for n in shape[2:]])
    target = np.zeros(stored[index].shape[::-1], "float32")
    del read[:]
    tensor.read_parts([(index, target.T)])  # one part alone, into a strided view
    np.testing.assert_array_equal(target.T, stored[index])
    # Of short rows, what lies between is read with them; of rows longer than a disk's page, it is not.
    assert sum(read) == (target.nbytes if len(shape) == 1 or shape == (6, 3000) else 4 * stored[halves[0][1]].size)
