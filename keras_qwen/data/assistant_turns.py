"""Where the assistant's turns lie in a rendered chat, found without marks in the template.

A probe, a short chat of our own, shows what the template writes before and after an assistant's text.  Then the chat is
rendered once more with every such mark in its own texts disguised: the marks that are left are the template's.
"""

import json
import re
from collections.abc import Mapping
from itertools import takewhile
from os.path import commonprefix
from weakref import WeakKeyDictionary

from keras_qwen.tokenizer.chat_template import ChatTemplateError

# Stand for the texts of the probe: private characters, so that nothing else in a rendered chat is equal to them.
_USER, _REPLY, _THOUGHT, _NEXT = "\ue000", "\ue001", "\ue002", "\ue003"
# A disguise moves a character to the same place in one of the two private planes: lengths stay, and it can be undone.
_ASSISTANT_PLANE, _OTHERS_PLANE = 0xF0000, 0x100000
_PROBES, _PROBES_KEPT = WeakKeyDictionary(), 64


def assistant_turns(tokenizer, text, messages, tools=None, variables=None):
    """Find the text that the assistant produces, turn by turn.

    Args:
        tokenizer: a `QwenTokenizer` with a chat template.
        text: the chat as the template renders it.
        messages: the chat.
        tools: what the chat was rendered with.
        variables: dict of template variables that the chat was rendered with.

    Returns:
        List of (start, end) positions in text, one for each assistant message: from behind what the generation prompt
        holds to behind the end-of-turn mark.

    Raises:
        ValueError: the template ends no turn with a mark, or renders turns so that they cannot be told apart.
    """
    variables = variables or {}

    def render(messages, tools=tools, variables=variables, add_generation_prompt=False):
        return tokenizer.apply_chat_template(messages, tools, add_generation_prompt, tokenize=False, **variables)

    header, opening, end_mark = _probed(tokenizer, render, messages, tools, variables)
    marks = [mark for mark in (header.strip(), end_mark) if mark]
    disguised = _render_disguised(render, text, messages, tools, variables, marks)
    indices = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    starts = [match.end() for match in re.finditer(re.escape(header), disguised)] if header.strip() else []
    if len(starts) != len(indices):
        starts, opening = [_length_before(render, text, messages, i) for i in indices], ""
    turns = []
    for index, start in zip(indices, starts, strict=True):
        inside = start + len(opening) if text.startswith(opening, start) else start
        end = disguised.find(end_mark, inside) + len(end_mark)
        if end < inside + len(end_mark) or _holds_others(text[start:end], disguised[start:end]):
            raise ValueError(f"messages[{index}]: the chat template does not end this turn with {end_mark!r}")
        _check_rendered(messages[index], text[start:end], f"messages[{index}]")
        turns.append((inside, end))
    for i, message in enumerate(messages):
        if not isinstance(message.get("content") or "", str):  # some templates render nothing for a list
            _check_rendered(message, text, f"messages[{i}]")
    return turns


def _probed(tokenizer, render, messages, tools, variables):
    """What `_probe` returns, kept: the chats of a dataset mostly differ in what comes after the first message."""
    leading = list(takewhile(lambda message: message["role"] not in ("user", "assistant", "tool"), messages))
    kept = _PROBES.setdefault(tokenizer, {})
    key = json.dumps([tokenizer.chat_template, leading, tools, variables], default=repr)
    if key not in kept:
        if len(kept) >= _PROBES_KEPT:
            kept.clear()
        kept[key] = _probe(render, leading, [tokenizer.id_to_token(i) for i in tokenizer.special_token_ids])
    return kept[key]


def _probe(render, leading, special_tokens):
    """Return what precedes every reply, what the generation prompt adds to that, and what ends a reply."""
    asked = [*leading, {"role": "user", "content": _USER}]
    reply, following = {"role": "assistant", "content": _REPLY}, {"role": "user", "content": _NEXT}
    try:
        before, prompted = render(asked), render(asked, add_generation_prompt=True)
        last, plain = render([*asked, reply]), render([*asked, reply, following])
        thoughtful = render([*asked, {**reply, "reasoning_content": _THOUGHT}, following])
    except ChatTemplateError as error:
        raise ValueError(
            f"a short chat shows how the template marks turns, but it refuses that one: {error}"
        ) from error
    before, prompted, plain_lead, thoughtful_lead = (
        re.split(f"[{_REPLY}{_THOUGHT}]", chat.rpartition(_USER)[2])[0]
        for chat in (before, prompted, plain, thoughtful)
    )
    lead = commonprefix([prompted, plain_lead, thoughtful_lead])
    header = lead[len(commonprefix([lead, before])) :]  # without what closes the user's turn
    end_mark = commonprefix([chat.rpartition(_REPLY)[2] for chat in (last, plain)])
    special = re.search("|".join(map(re.escape, special_tokens)) or "(?!)", end_mark)
    end_mark = (end_mark[: special.end()] if special else end_mark).strip()
    if not end_mark:
        raise ValueError(
            "the chat template puts no mark behind an assistant's message, so that a model could not learn to stop: "
            "let it write the tokenizer's eos_token there"
        )
    return header, prompted[len(lead) :], end_mark


def _render_disguised(render, text, messages, tools, variables, marks):
    """Render the chat with disguised texts; that undoing the disguise gives the chat proves that nothing moved."""
    mark = re.compile("|".join(map(re.escape, marks)))
    tools, variables = _cover(tools, mark, _OTHERS_PLANE), _cover(variables, mark, _OTHERS_PLANE)
    # A template may depend on how a message begins: then there is less to tell the others' texts by.
    for and_beginnings in (True, False):
        disguised = [_disguise(message, mark, and_beginnings) for message in messages]
        try:
            rendered = render(disguised, tools, variables)
        except ChatTemplateError:
            continue
        if _uncover(rendered) == _uncover(text):
            return rendered
    raise ValueError(
        f"cannot tell the template's marks from those in this chat's texts: take {' and '.join(map(repr, marks))} "
        "out of its messages, tools and template variables"
    )


def _disguise(message, mark, and_beginning):
    """Disguise the marks in a message, and where another than the assistant begins to speak."""
    own = message["role"] == "assistant"
    covered = _cover(message, mark, _ASSISTANT_PLANE if own else _OTHERS_PLANE) | {"role": message["role"]}
    if and_beginning and not own and isinstance(covered.get("content"), str):
        beginning = re.compile(r"\A((?:\s|<[^<>\s]*>)*+)(\S)")  # templates look for tags
        covered["content"] = beginning.sub(lambda m: m[1] + _shift(m[2], _OTHERS_PLANE), covered["content"])
    return covered


def _cover(value, pattern, plane):
    """Disguise what a pattern matches in all strings inside a value."""
    if isinstance(value, str):
        return pattern.sub(lambda match: _shift(match[0], plane), value)
    if isinstance(value, Mapping):
        return {_cover(key, pattern, plane): _cover(item, pattern, plane) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_cover(item, pattern, plane) for item in value]
    return value


def _shift(text, plane):
    return "".join(c if c.isspace() or c > "\uffff" else chr(ord(c) + plane) for c in text)


def _uncover(text):
    return re.sub("[\U000f0000-\U0010ffff]", lambda match: chr(ord(match[0]) & 0xFFFF), text)


def _holds_others(text, disguised):
    return any(cover >= chr(_OTHERS_PLANE) and cover != plain for plain, cover in zip(text, disguised, strict=True))


def _length_before(render, text, messages, index):
    """How much of the text precedes a turn, if the template only ever appends to a chat."""
    try:
        prompt = render(messages[:index], add_generation_prompt=True) if index else None
    except ChatTemplateError:
        prompt = None
    if prompt is None or not text.startswith(prompt):
        raise ValueError(
            f"messages[{index}]: cannot tell where this turn begins, since the chat template neither begins every "
            "assistant turn as its generation prompt begins, nor keeps earlier turns as they were"
        )
    return len(prompt)


def _check_rendered(message, rendered, where):
    """Refuse templates that drop what a message says; thoughts may be dropped."""
    content = message.get("content") or ""
    parts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
    for part in parts:
        answer = part.rpartition("</think>")[2].strip()
        if answer not in rendered:
            hint = "" if isinstance(content, str) else "; pass the content as a str"
            raise ValueError(f"{where}: the chat template does not render {answer[:40]!r} as it is{hint}")
