"""Chat templates: the jinja text of a checkpoint, rendered as transformers renders it, in jinja2's sandbox."""

import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache

import jinja2
import numpy as np
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

# The layout Qwen's checkpoints share, without what differs between them (tools, thinking, a default system text).
CHATML = """\
{% if tools %}
{{ raise_exception("this chat template has no place for tools") }}
{% endif %}
{% for message in messages %}
{% if message.role == "system" and not loop.first %}
{{ raise_exception("a system message has to be the first one") }}
{% endif %}
{% if message.tool_calls %}
{{ raise_exception("this chat template has no place for tool calls") }}
{% endif %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""

# What a template's own mistakes, or input it was not written for, raise while it is rendered.
_RENDER_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class ChatTemplateError(ValueError):
    """A chat template is not valid, refuses the chat, or tries to leave its sandbox."""


def render_chat_template(template, messages, *, tools=None, add_generation_prompt=False, variables=None):
    """Render a chat, as `transformers.PreTrainedTokenizerBase.apply_chat_template` does without tokenising.

    Args:
        template: jinja text.
        messages: list of dicts with `role`, `content` and whatever else the template reads (`tool_calls`,
            `reasoning_content`).  Keys whose value is None count as missing.
        tools: list of JSON schemas (dicts), or None.
        add_generation_prompt: whether to end with what precedes the assistant's reply.
        variables: mapping of further template variables.

    Returns:
        The rendered text.

    Raises:
        ChatTemplateError: the template is not valid, raised an exception, or tried to reach Python internals.
        ValueError: messages, tools or variables are not what a template can read; names which.

    Example:
        >>> render_chat_template(CHATML, [{"role": "user", "content": "Hi"}])
        '<|im_start|>user\\nHi<|im_end|>\\n'
    """
    check_messages(messages)
    if tools is not None and not (isinstance(tools, list | tuple) and all(isinstance(tool, Mapping) for tool in tools)):
        raise ValueError("tools must be a list of JSON schemas (dicts), one for each function")
    values = {"documents": None, **_plain(variables or {}, "template variables")}
    chat = [_plain_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    compiled = _compile(template)
    try:
        return compiled.render(
            messages=chat, tools=_plain(tools, "tools"), add_generation_prompt=add_generation_prompt, **values
        )
    except SecurityError as error:
        raise ChatTemplateError(f"the chat template tries to reach Python internals: {error}") from error
    except _RENDER_ERRORS as error:
        raise ChatTemplateError(f"the chat template cannot render this chat: {error}") from error


def check_messages(messages):
    """Refuse what is not a chat.

    Args:
        messages: the chat.

    Raises:
        ValueError: it is empty or not a list of dicts, or a role or content is missing or of the wrong type; names the
            message's index.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError(f"messages must be a list of at least one message (dict), got {_brief(messages)}")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f"messages[{i}] must be a dict with 'role' and 'content', got {_brief(message)}")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise ValueError(f"messages[{i}]['role'] must be a str such as 'user', got {_brief(role)}")
        if content is None:
            # An assistant may answer with calls or thoughts alone.
            if role == "assistant" and (message.get("tool_calls") or reasoning_of(message)):
                continue
            raise ValueError(f"messages[{i}]['content'] is missing; give the {role}'s text")
        if isinstance(content, list | tuple) and all(isinstance(part, Mapping) for part in content):
            continue
        if not isinstance(content, str):
            raise ValueError(f"messages[{i}]['content'] must be a str or a list of dicts, got {_brief(content)}")


def _brief(value):
    return f"{type(value).__name__} {value!r}"[:80]


def reasoning_of(message):
    """Return the thoughts that a message comes with, by whichever name, or None."""
    names = ("reasoning_content", "thinking", "reasoning")
    return next((message[name] for name in names if message.get(name) is not None), None)


def _plain_message(message, where):
    plain = {key: value for key, value in _plain(message, where).items() if value is not None}
    # Chats from elsewhere call it `thinking` or `reasoning`; Qwen's templates read `reasoning_content`.
    reasoning = reasoning_of(plain)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _plain(value, where):
    """Rebuild from plain types: other objects have methods that the sandbox does not know to be dangerous."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {key: _plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    raise ValueError(f"{where} is a {type(value).__name__}; chat templates take str, numbers, bool, dict and list")


class _GenerationTag(Extension):
    """`{% generation %}`: some templates mark the assistant's text with it; it renders what it encloses."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Sandbox(ImmutableSandboxedEnvironment):
    def unsafe_undefined(self, obj, attribute):
        # jinja2 would go on with an empty text; a template that does this is hostile.
        raise SecurityError(f"attribute {attribute!r} of a {type(obj).__name__} object")


def _raise_exception(message):
    raise jinja2.TemplateError(message)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    # jinja2's own filter escapes HTML's characters, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=32)
def _compile(template):
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    try:
        return environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(f"the chat template is not jinja, line {error.lineno}: {error.message}") from error
