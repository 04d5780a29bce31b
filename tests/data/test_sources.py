"""Where records come from, and that what is wrong with one is said with its file and line."""

import importlib.util
import json
import pickle

import pytest

from keras_qwen.data.sources import open_source

RECORDS = [{"text": f"document {i}"} for i in range(5)]


def write_jsonl(path, records=RECORDS):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read(source):
    return [source[i] for i in range(len(source))]


def test_jsonl_by_position(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\n{"a": "Zo\xc3\xab"}\n\n  \n{"a": 2}\n{"a": 3}')
    source = open_source(path)
    assert [source[i]["a"] for i in (2, 0, 1)] == [3, "Zoë", 2]
    assert [source.where(i) for i in range(3)] == [f"{path}, line {n}" for n in (2, 5, 6)]
    assert read(pickle.loads(pickle.dumps(source))) == read(source)


@pytest.mark.parametrize(("line", "reason"), [(b"{nonsense", "not JSON"), (b'{"a": "\xff"}', "not UTF-8")])
def test_bad_lines_are_found_when_they_are_read(tmp_path, line, reason):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n' + line + b"\n")
    source = open_source(path)
    assert source[0] == {"a": 1}
    with pytest.raises(ValueError, match=reason):
        source[1]


def test_patterns_and_lists_of_paths(tmp_path):
    write_jsonl(tmp_path / "b.jsonl", RECORDS[2:])
    write_jsonl(tmp_path / "a.jsonl", RECORDS[:2])
    source = open_source(str(tmp_path / "*.jsonl"))
    assert read(source) == RECORDS
    assert source.where(2) == f"{tmp_path / 'b.jsonl'}, line 1"
    assert read(open_source([tmp_path / "b.jsonl", str(tmp_path / "a.jsonl")])) == RECORDS[2:] + RECORDS[:2]


def test_other_forms(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(RECORDS))
    assert read(open_source(tmp_path / "a.json")) == RECORDS
    assert read(open_source(RECORDS)) == RECORDS
    assert open_source(RECORDS).where(3) == "source[3]"

    class Dataset:  # what is used of a `datasets.Dataset`
        _fingerprint = "f00"

        def __len__(self):
            return len(RECORDS)

        def __getitem__(self, index):
            return RECORDS[index]

    assert read(open_source(Dataset())) == RECORDS
    assert open_source(Dataset()).digest() == "f00"


def test_a_text_file_is_cut_at_line_ends(tmp_path, monkeypatch):
    monkeypatch.setattr("keras_qwen.data.sources._TEXT_BLOCK", 10)
    path = tmp_path / "a.txt"
    text = "".join(f"line {i} é\n" for i in range(7)) + "the end"
    path.write_text(text, encoding="utf-8")
    blocks = read(open_source(path))
    assert "".join(block["text"] for block in blocks) == text and len(blocks) > 2
    assert [block["text_goes_on"] for block in blocks] == [True] * (len(blocks) - 1) + [False]
    assert open_source(path).where(1) == f"{path}, from byte {len(blocks[0]['text'].encode())} on"


@pytest.mark.skipif(not importlib.util.find_spec("pyarrow"), reason="needs pyarrow")
def test_parquet(tmp_path):
    import pyarrow
    from pyarrow import parquet

    chats = [{"messages": [{"role": "user", "content": f"{i}"}], "tools": None} for i in range(7)]
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(chats), path, row_group_size=3)
    source = open_source(path)
    assert len(source) == 7 and source[5] == chats[5] and source[0] == chats[0]
    assert source.where(5) == f"{path}, row 6"
    copy = pickle.loads(pickle.dumps(source))
    assert copy[6] == chats[6]
    path.write_bytes(b"PAR1nonsense")
    with pytest.raises(ValueError, match=r"a\.parquet is not a Parquet file"):
        open_source(path)


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(ImportError, match=r"keras-qwen\[parquet\]"):
        open_source(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "x", "not .csv"),
        ("a.jsonl", "\n\n", "holds no record"),
        ("a.json", "{}", "holds a list of records"),
        ("a.txt", "", "holds no record"),
    ],
)
def test_files_that_hold_nothing(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        open_source(tmp_path / name)
    assert name in str(error.value)


def test_what_is_no_source(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no file .*missing.jsonl"):
        open_source(tmp_path / "missing.jsonl")
    with pytest.raises(FileNotFoundError, match="no file matches the pattern"):
        open_source(str(tmp_path / "*.jsonl"))
    with pytest.raises(ValueError, match="is a folder"):
        open_source(tmp_path)
    with pytest.raises(ValueError, match="choose one of 'train', 'test'"):
        open_source({"train": RECORDS, "test": RECORDS})
    with pytest.raises(ValueError, match="generator has no length"):
        open_source(record for record in RECORDS)
    with pytest.raises(ValueError, match="holds no record"):
        open_source([])


def test_digests_follow_the_content(tmp_path):
    digest = open_source(write_jsonl(tmp_path / "a.jsonl")).digest()
    assert open_source(write_jsonl(tmp_path / "b.jsonl")).digest() == digest
    other = [*RECORDS[:3], {"text": "document 9"}, RECORDS[4]]
    assert open_source(write_jsonl(tmp_path / "a.jsonl", other)).digest() != digest
    assert open_source(RECORDS).digest() == open_source(list(RECORDS)).digest() != open_source(other).digest()
