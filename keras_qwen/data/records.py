"""What a record says, in whichever of the usual forms it is written: a chat, a text, or a preference."""

import json
from collections.abc import Mapping
from typing import NamedTuple

_FORMS = "messages, conversations, prompt and completion, text"
_ROLES = {
    "system": ("system",),
    "user": ("human", "user"),
    "assistant": ("gpt", "assistant", "chatgpt", "model", "bot", "function_call"),
    "tool": ("tool", "observation", "function_response"),
}
_ROLE_OF = {name: role for role, names in _ROLES.items() for name in names}


class Chat(NamedTuple):
    """Messages, and what their template reads besides."""

    messages: list
    tools: list | None
    variables: dict


class Text(NamedTuple):
    """Raw text; `ends` is False where the document goes on in the next record."""

    text: str
    ends: bool


class Preference(NamedTuple):
    """Two chats with a common beginning, of `prompt_length` messages."""

    chosen: Chat
    rejected: Chat
    prompt_length: int


def read_document(record):
    """The chat or text of a record.

    Args:
        record: dict with `messages`, with `conversations` (ShareGPT's `from` and `value`), with `prompt` and
            `completion` (texts, or lists of messages), or with `text`. Of a chat, `tools` and `chat_template_kwargs`
            are read besides.

    Returns:
        A `Chat` or a `Text`.

    Raises:
        ValueError: it is none of these, or something in it is missing or of the wrong type.

    Example:
        >>> read_document({"prompt": "2+2?", "completion": "4"}).messages[1]
        {'role': 'assistant', 'content': '4'}
    """
    keys = _keys(record)
    if "messages" in keys:
        return _chat(record, record["messages"])
    if "conversations" in keys:
        return _chat(record, _from_sharegpt(record))
    if {"prompt", "completion"} <= keys:
        return _chat(record, [*_said("user", record["prompt"]), *_said("assistant", record["completion"])])
    if "text" in keys:
        if not isinstance(record["text"], str) or not record["text"]:
            raise ValueError(f"text must be a str that is not empty, got {_brief(record['text'])}")
        return Text(record["text"], not record.get("text_goes_on"))
    raise ValueError(f"a record has one of {_FORMS}; this one has {_names(record)}")


def read_preference(record):
    """The preference of a record.

    Args:
        record: dict with `prompt`, `chosen` and `rejected`, each a text or a list of messages; without `prompt`,
            `chosen` and `rejected` are whole chats that begin alike.

    Returns:
        A `Preference`.

    Raises:
        ValueError: something in it is missing or of the wrong type, or the two do not differ.
    """
    keys = _keys(record)
    if not {"chosen", "rejected"} <= keys:
        raise ValueError(f"a preference has prompt, chosen and rejected; this record has {_names(record)}")
    chosen, rejected = (_said("assistant", record[name]) for name in ("chosen", "rejected"))
    prompt = _said("user", record["prompt"]) if "prompt" in keys else []
    if not prompt:
        same = [one == other for one, other in zip(chosen, rejected, strict=False)]
        common = same.index(False) if False in same else len(same)
        prompt, chosen, rejected = chosen[:common], chosen[common:], rejected[common:]
    if chosen == rejected or not chosen or not rejected:
        raise ValueError("chosen and rejected must both be there, and differ")
    return Preference(_chat(record, [*prompt, *chosen]), _chat(record, [*prompt, *rejected]), len(prompt))


def check_roles(messages):
    """Refuse a chat whose roles are out of order, which most templates would render all the same.

    Args:
        messages: list of dicts with `role`.

    Raises:
        ValueError: a system message is not the first, a user does not speak first, or a tool's result follows no call;
            names the message.
    """
    before = None
    for index, message in enumerate(messages):
        role, where = message["role"], f"messages[{index}] (role {message['role']!r})"
        if role == "system" and index:
            raise ValueError(f"{where}: a system message has to be the first one")
        if role == "assistant" and before in (None, "system"):
            raise ValueError(f"{where}: a user speaks before the assistant does")
        if role == "tool" and before not in ("assistant", "tool"):
            raise ValueError(f"{where}: a tool's result follows the assistant's call")
        before = role


def _keys(record):
    if not isinstance(record, Mapping):
        raise ValueError(f"a record is a dict (a JSON object), got {_brief(record)}")
    return {key for key, value in record.items() if value is not None}  # tables have every column in every row


def _names(record):
    return ", ".join(map(str, record)) or "nothing"


def _chat(record, messages):
    variables = record.get("chat_template_kwargs") or {}
    if not isinstance(variables, Mapping):
        raise ValueError(f"chat_template_kwargs must be a dict of template variables, got {_brief(variables)}")
    return Chat(messages, _from_json(record.get("tools"), "tools") or None, dict(variables))


def _said(role, content):
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if isinstance(content, list | tuple):
        return list(content)
    raise ValueError(f"the {role}'s part must be a str or a list of messages, got {_brief(content)}")


def _from_sharegpt(record):
    turns = record["conversations"]
    if not isinstance(turns, list | tuple):
        raise ValueError(f"conversations must be a list of dicts with from and value, got {_brief(turns)}")
    messages = [{"role": "system", "content": record["system"]}] if record.get("system") else []
    for index, turn in enumerate(turns):
        where = f"conversations[{index}]"
        if not isinstance(turn, Mapping) or not {"from", "value"} <= turn.keys():
            raise ValueError(f"{where} must be a dict with from and value, got {_brief(turn)}")
        speaker, value = turn["from"], turn["value"]
        if speaker not in _ROLE_OF:
            raise ValueError(f"{where}: nobody is called {speaker!r}; from is one of {', '.join(_ROLE_OF)}")
        if speaker == "function_call":
            call = _from_json(value, f"{where}['value']")
            messages.append(
                {"role": "assistant", "content": "", "tool_calls": call if isinstance(call, list) else [call]}
            )
        else:
            messages.append({"role": _ROLE_OF[speaker], "content": value})
    return messages


def _from_json(value, where):
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is a str that is not JSON ({error})") from error


def _brief(value):
    return f"{type(value).__name__} {value!r}"[:80]
