"""Reads chats from .jsonl files."""

import json
from pathlib import Path


def read_chats(path):
    """Reads the chats of a .jsonl file: one JSON object a line, with its messages under `messages`.

    Args:
        path: the file. Blank lines are passed over.

    Returns:
        A list of dicts, each as it stands in the file: `{"messages": [{"role": ..., "content": ...}, ...]}`, with
        further keys (`tools`, say) kept.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is not such an object, or the file holds no chat; the message names file and line.

    Example:
        >>> chats = read_chats("chats.jsonl")
        >>> chats[0]["messages"][0]["role"]
        'user'
    """
    chats = []
    with Path(path).open("rb") as lines:  # as bytes: a line that is not UTF-8 is then one bad line, with its number
        for number, line in enumerate(lines, start=1):
            if line.strip():
                chats.append(_parse_chat(line, f"{path}, line {number}"))
    if not chats:
        raise ValueError(f"{path} holds no chat; put one JSON object with a list of messages on each line")
    return chats


def parse_json(text, where=""):
    """Parse JSON.

    Args:
        text: bytes.
        where: what messages begin with.

    Returns:
        The value.

    Raises:
        ValueError: it is not UTF-8, or not JSON.
    """
    try:
        return json.loads(text)
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}not UTF-8 ({error.reason}); save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}not JSON ({error}); each line is one JSON object") from error


def _parse_chat(line, where):
    chat = parse_json(line, f"{where}: ")
    messages = chat.get("messages") if isinstance(chat, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ValueError(f'{where}: no list of messages; a chat is written {{"messages": [{{"role": ..., ...}}, ...]}}')
    for index, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f'{where}: message {index} has no "role" (system, user, assistant or tool)')
        # An assistant that calls tools may say nothing besides.
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            raise ValueError(f'{where}: message {index} has no "content"; give it a text')
    return chat
