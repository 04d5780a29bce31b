"""Chats as training data: token ids, and which of them the assistant produced."""

from bisect import bisect_left

from keras_qwen.data.assistant_turns import assistant_turns
from keras_qwen.tokenizer.chat_template import ChatTemplateError, check_messages, reasoning_of


def encode_chat(tokenizer, messages, tools=None, **template_variables):
    """Encode a chat and mark the tokens to train on: the assistant's turns, each with its end-of-turn mark.

    The ids are those of `tokenizer.apply_chat_template(messages, tools, **template_variables)`.  What the template's
    generation prompt holds counts as prompt wherever a turn begins with it, as does a token that straddles its end: a
    model is trained on what it will have to produce, after what it will be given.  Texts that only look like a turn of
    the assistant, in a user's message say, are not trained on.

    Args:
        tokenizer: a `QwenTokenizer` with a chat template; the template needs no `{% generation %}` marks.
        messages: list of dicts with `role`, `content`, and what the template reads besides.
        tools: list of JSON schemas of the functions that the assistant may call.
        **template_variables: what the template reads, such as `enable_thinking=False`.

    Returns:
        Dict of `token_ids` and `assistant_mask` (1 = produced by the assistant), lists of int of one length.

    Raises:
        ValueError: there is no assistant message, a message is empty, not valid, or refused by the template (names its
            index), or the template marks turns in a way that cannot be recognised.

    Example:
        >>> example = kq.data.encode_chat(tokenizer, [
        ...     {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}])
        >>> tokenizer.decode([i for i, on in zip(example["token_ids"], example["assistant_mask"]) if on])
        '4<|im_end|>'
    """
    ids, turns = encode_turns(tokenizer, messages, tools, template_variables)
    mask = [0] * len(ids)
    for first, last in turns:
        mask[first:last] = [1] * (last - first)
    return {"token_ids": ids, "assistant_mask": mask}


def encode_turns(tokenizer, messages, tools=None, template_variables=None):
    """Encode a chat, and say which tokens each of the assistant's turns is.

    Args:
        tokenizer, messages, tools: as of `encode_chat`.
        template_variables: dict.

    Returns:
        The list of ids, and a list of (first, last) positions in it, one for each assistant message, last excluded.

    Raises:
        ValueError: as of `encode_chat`.
    """
    variables = template_variables or {}
    for name in ("add_generation_prompt", "tokenize"):
        if name in variables:
            raise ValueError(f"encode_chat sets {name} itself; leave it out")
    check_messages(messages)
    _check_contents(messages)
    text = _render(tokenizer, messages, tools, variables)
    ids, offsets = tokenizer.encode_with_offsets(text)
    first_characters = [start for start, _ in offsets]
    turns = []
    for start, end in assistant_turns(tokenizer, text, messages, tools, variables):
        first, last = bisect_left(first_characters, start), bisect_left(first_characters, end)
        _prove(tokenizer, ids[first:last], text, offsets[first:last])
        turns.append((first, last))
    return ids, turns


def _check_contents(messages):
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError(
            "the chat has no assistant message (messages[...]['role'] == 'assistant'): nothing to train on"
        )
    for i, message in enumerate(messages):
        role, content = message["role"], message.get("content")
        says_otherwise = message.get("tool_calls") or reasoning_of(message)
        if role in ("user", "assistant") and not content and not says_otherwise:
            raise ValueError(f"messages[{i}]: the {role}'s content is empty; leave such a chat out")


def _render(tokenizer, messages, tools, variables):
    def render(messages):
        return tokenizer.apply_chat_template(messages, tools, tokenize=False, **variables)

    def renders(messages):
        try:
            return bool(render(messages))
        except ChatTemplateError:
            return False

    try:
        return render(messages)
    except ChatTemplateError as error:
        # The longest beginning that is accepted ends before the message that is not.
        culprit = next((i for i in range(len(messages) - 1, 0, -1) if renders(messages[:i])), 0)
        raise ValueError(f"messages[{culprit}] (role {messages[culprit]['role']!r}): {error}") from error


def _prove(tokenizer, ids, text, offsets):
    """Check that the marked tokens say what the turn says."""
    said = text[offsets[0][0] : offsets[-1][1]] if ids else None
    # Both are normalised, since a special token's last character is never composed with what follows it.
    if not ids or tokenizer.normalize(tokenizer.decode(ids)) != tokenizer.normalize(said):
        raise ValueError(f"the tokenizer does not give an assistant turn back: {tokenizer.decode(ids)!r} for {said!r}")
