"""The forms in which chats, texts and preferences are written."""

import pytest

from keras_qwen.data.records import Text, check_roles, read_document, read_preference


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [user("a"), assistant("b")]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "text": None},
        {"prompt": "a", "completion": "b"},
        {"prompt": [user("a")], "completion": [assistant("b")]},
    ],
)
def test_one_chat_in_every_form(record):
    assert read_document(record) == ([user("a"), assistant("b")], None, {})


def test_sharegpt_with_everything():
    turns = [("system", "s"), ("human", "q"), ("function_call", '{"name": "f", "arguments": {}}'), ("observation", "r")]
    record = {"conversations": [{"from": f, "value": v} for f, v in turns], "tools": '[{"name": "f"}]'}
    chat = read_document(record)
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {}}]}
    assert chat.messages == [{"role": "system", "content": "s"}, user("q"), call, {"role": "tool", "content": "r"}]
    assert chat.tools == [{"name": "f"}]
    record = {"system": "s", "conversations": [{"from": "human", "value": "q"}]}
    assert read_document(record).messages == [{"role": "system", "content": "s"}, user("q")]


def test_texts():
    assert read_document({"text": "once"}) == Text("once", True)
    assert read_document({"text": "once", "text_goes_on": True}) == Text("once", False)


def test_template_variables_of_a_record():
    record = {"messages": [user("a")], "chat_template_kwargs": {"enable_thinking": False}}
    assert read_document(record).variables == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([], "a record is a dict"),
        ({"content": "x"}, "this one has content"),
        ({}, "this one has nothing"),
        ({"text": ""}, "text must be a str that is not empty"),
        ({"text": 3}, "text must be a str"),
        ({"prompt": 3, "completion": "b"}, "the user's part must be a str or a list"),
        ({"conversations": "hello"}, "conversations must be a list"),
        ({"conversations": [{"from": "human"}]}, r"conversations\[0\] must be a dict with from and value"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, "nobody is called 'alien'"),
        ({"conversations": [{"from": "function_call", "value": "{"}]}, r"conversations\[0\]\['value'\] is .* not JSON"),
        ({"messages": [user("a")], "chat_template_kwargs": 3}, "chat_template_kwargs must be a dict"),
    ],
)
def test_what_is_no_document(record, message):
    with pytest.raises(ValueError, match=message):
        read_document(record)


def test_preferences():
    expected = ([user("q"), assistant("good")], [user("q"), assistant("bad")], 1)
    whole = {"chosen": expected[0], "rejected": expected[1]}
    for record in ({"prompt": "q", "chosen": "good", "rejected": "bad"}, whole):
        chosen, rejected, prompt_length = read_preference(record)
        assert (chosen.messages, rejected.messages, prompt_length) == expected
    for record in (
        {"prompt": "q", "chosen": "good", "rejected": "good"},
        {"chosen": [user("q")], "rejected": [user("q"), assistant("b")]},
    ):
        with pytest.raises(ValueError, match="must both be there, and differ"):
            read_preference(record)
    with pytest.raises(ValueError, match="a preference has prompt, chosen and rejected"):
        read_preference({"prompt": "q", "chosen": "good"})


@pytest.mark.parametrize(
    ("roles", "culprit"),
    [
        ("user system assistant", 1),
        ("assistant user", 0),
        ("system assistant", 1),
        ("user tool assistant", 1),
        ("system user assistant assistant tool tool assistant user", None),
        ("user user assistant", None),
    ],
)
def test_roles_out_of_order(roles, culprit):
    messages = [{"role": role, "content": "x"} for role in roles.split()]
    if culprit is None:
        check_roles(messages)
    else:
        with pytest.raises(ValueError, match=rf"messages\[{culprit}\] \(role "):
            check_roles(messages)
