import json

import pytest

from keras_qwen.data.reading import read_chats

CHAT = {"messages": [{"role": "user", "content": "Hi, Zoë"}, {"role": "assistant", "content": "Hello!"}], "source": 3}


def test_reads_every_chat_as_it_stands(tmp_path):
    path = tmp_path / "chats.jsonl"
    calls = {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}]}
    lines = [json.dumps(CHAT), "", json.dumps(CHAT, ensure_ascii=False), json.dumps(calls)]
    path.write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    assert read_chats(path) == [CHAT, CHAT, calls]
    assert read_chats(str(path)) == [CHAT, CHAT, calls]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"messages": [', "not JSON"),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', "not UTF-8"),
        (b"[]", "no list of messages"),
        (b"{}", "no list of messages"),
        (b'{"messages": []}', "no list of messages"),
        (b'{"messages": "hello"}', "no list of messages"),
        (b'{"messages": ["hello"]}', 'message 1 has no "role"'),
        (b'{"messages": [{"content": "hello"}]}', 'message 1 has no "role"'),
        (b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant"}]}', 'message 2 has no "content"'),
        (b'{"messages": [{"role": "user", "content": 3}]}', 'message 1 has no "content"'),
    ],
)
def test_bad_line_is_named(tmp_path, line, reason):
    path = tmp_path / "chats.jsonl"
    path.write_bytes(json.dumps(CHAT).encode() + b"\n\n" + line + b"\n")
    with pytest.raises(ValueError) as error:
        read_chats(path)
    assert str(error.value).startswith(f"{path}, line 3: ") and reason in str(error.value)


def test_file_without_chats(tmp_path):
    path = tmp_path / "empty.jsonl"
    path.write_text("\n")
    with pytest.raises(ValueError, match="empty.jsonl holds no chat"):
        read_chats(path)
    with pytest.raises(FileNotFoundError, match="missing.jsonl"):
        read_chats(tmp_path / "missing.jsonl")
