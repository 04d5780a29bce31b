"""Chats, templates and tokenizers that no training data can be made of, each refused with a reason."""

import pytest

from keras_qwen.data.chat import encode_chat
from keras_qwen.tokenizer import QwenTokenizer
from keras_qwen.tokenizer.byte_level import byte_level_bpe
from keras_qwen.tokenizer.chat_template import CHATML


def system(content):
    return {"role": "system", "content": content}


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def tool(content):
    return {"role": "tool", "content": content}


@pytest.fixture
def tokenizer():
    return QwenTokenizer.train(["What is the time?"], 260)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        ([user("a")], "no assistant message"),
        ([user(""), assistant("b")], r"messages\[0\]: the user's content is empty"),
        ([user("a"), assistant("")], r"messages\[1\]: the assistant's content is empty"),
        ([user("a"), assistant([])], r"messages\[1\]: the assistant's content is empty"),
        ([user("a"), assistant("", tool_calls=[], reasoning="")], r"messages\[1\]: the assistant's content is empty"),
        ([user("a"), assistant(7)], r"messages\[1\]\['content'\] must be a str"),
        ([user("a"), assistant("b"), {"content": "c"}], r"messages\[2\]\['role'\]"),
        ([user("a"), "b"], r"messages\[1\] must be a dict"),
        (
            [user("a"), assistant("b"), system("late"), user("c")],
            r"messages\[2\] \(role 'system'\): .*has to be the first",
        ),
    ],
)
def test_what_is_no_training_chat(tokenizer, messages, message):
    with pytest.raises(ValueError, match=message):
        encode_chat(tokenizer, messages)


@pytest.mark.parametrize(
    ("messages", "culprit"), [([assistant("b"), user("a")], 0), ([user("a"), assistant("b"), assistant("c")], 2)]
)
def test_roles_out_of_order_are_named(tokenizer, messages, culprit):
    tokenizer.chat_template = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + CHATML
    )
    with pytest.raises(ValueError, match=rf"messages\[{culprit}\] \(role 'assistant'\): .*roles must alternate"):
        encode_chat(tokenizer, messages)


def test_settings_of_its_own_are_refused(tokenizer):
    with pytest.raises(ValueError, match="add_generation_prompt"):
        encode_chat(tokenizer, [user("a"), assistant("b")], add_generation_prompt=True)


def test_a_missing_template(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="set tokenizer.chat_template"):
        encode_chat(tokenizer, [user("a"), assistant("b")])


def test_a_tokenizer_that_loses_text_is_found_out():
    letters = {character: i for i, character in enumerate("useraintĊb")}
    bpe = byte_level_bpe(letters)
    bpe.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer = QwenTokenizer(bpe, chat_template=CHATML)
    assert sum(encode_chat(tokenizer, [user("a"), assistant("b")])["assistant_mask"]) == 2
    with pytest.raises(ValueError, match="does not give an assistant turn back: 'b<|im_end|>' for 'bz<|im_end|>'"):
        encode_chat(tokenizer, [user("a"), assistant("bz")])


def test_a_template_that_writes_no_end(tokenizer):
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    with pytest.raises(ValueError, match="no mark behind an assistant's message.*eos_token"):
        encode_chat(tokenizer, [user("a"), assistant("b")])


def test_a_template_that_ends_some_turns_otherwise(tokenizer):
    other = "{{ message.content }}{{ '<|endoftext|>' if 'call' in message.content else '<|im_end|>' }}"
    tokenizer.chat_template = CHATML.replace("{{ message.content }}<|im_end|>", other)
    with pytest.raises(ValueError, match=r"messages\[1\]: .* does not end this turn with '<\|im_end\|>'"):
        encode_chat(tokenizer, [user("a"), assistant("call"), tool("12"), assistant("b")])


def test_a_template_that_drops_what_the_assistant_says(tokenizer):
    tokenizer.chat_template = CHATML.replace("message.content }}", "message.content[:3] }}")
    with pytest.raises(ValueError, match=r"messages\[3\]: .* does not render 'four'"):
        encode_chat(tokenizer, [user("a"), assistant("one"), user("b"), assistant("four")])


@pytest.mark.parametrize("dropped", [0, 1])
def test_a_template_that_drops_content_in_parts(tokenizer, dropped):
    tokenizer.chat_template = CHATML.replace(
        "{{ message.content }}", "{{ message.content if message.content is string }}"
    )
    chat = [user("a word"), assistant("a word")]
    chat[dropped]["content"] = [{"type": "text", "text": "parts"}]
    with pytest.raises(ValueError, match=rf"messages\[{dropped}\]: .* 'parts' .*pass the content as a str"):
        encode_chat(tokenizer, chat)


def test_a_template_that_hides_where_a_turn_begins(tokenizer):
    tokenizer.chat_template = "{% for m in messages %}{{ messages | length }} {{ m.content }}<|im_end|>{% endfor %}"
    with pytest.raises(ValueError, match=r"messages\[1\]: cannot tell where this turn begins"):
        encode_chat(tokenizer, [user("a"), assistant("b")])
