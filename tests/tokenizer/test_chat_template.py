"""Chats as text: what templates may use, what they may not, and what is refused."""

import datetime

import numpy as np
import pytest

from keras_qwen.tokenizer import QwenTokenizer
from keras_qwen.tokenizer.chat_template import CHATML, ChatTemplateError, render_chat_template

TOOL = {"type": "function", "function": {"name": "get_time", "description": "It's <now> & here — é"}}
USER = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def tokenizer():
    return QwenTokenizer.train(["The sea is warm."], 270)


def render(template, messages=(USER,), **variables):
    options = {name: variables.pop(name) for name in ("tools", "add_generation_prompt") if name in variables}
    return render_chat_template(template, list(messages), variables=variables, **options)


class TestChatML:
    def test_turns(self):
        chat = [{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": "Hello\nyou\n"}]
        assert render(CHATML, chat) == (
            "<|im_start|>system\nBe brief.<|im_end|>\n"
            "<|im_start|>user\nHi<|im_end|>\n"
            "<|im_start|>assistant\nHello\nyou\n<|im_end|>\n"
        )

    def test_generation_prompt(self):
        assert render(CHATML, add_generation_prompt=True) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"

    @pytest.mark.parametrize(
        ("messages", "tools", "message"),
        [
            ([USER], [TOOL], "no place for tools"),
            ([USER, {"role": "assistant", "tool_calls": [TOOL]}], None, "no place for tool calls"),
            ([USER, {"role": "system", "content": "late"}], None, "system message has to be the first"),
        ],
    )
    def test_nothing_is_dropped_in_silence(self, messages, tools, message):
        with pytest.raises(ChatTemplateError, match=message):
            render(CHATML, messages, tools=tools)


class TestAsTransformersRenders:
    """Expected texts are those of transformers 5.24's apply_chat_template."""

    def test_blocks_take_their_line_with_them(self):
        template = "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\nend\n"
        assert render(template) == "Hi\nend"

    def test_tojson_keeps_characters(self):
        template = "{{ tools[0] | tojson }}|{{ {'b': 1, 'a': [none, true]} | tojson(indent=1, sort_keys=True) }}"
        assert render(template, tools=[TOOL]) == (
            '{"type": "function", "function": {"name": "get_time", "description": "It\'s <now> & here — é"}}'
            '|{\n "a": [\n  null,\n  true\n ],\n "b": 1\n}'
        )
        assert render("{{ 'é' | tojson(ensure_ascii=True, separators=(',', ':')) }}") == '"\\u00e9"'

    def test_loop_controls(self):
        skip, stop = "{% if i == 1 %}{% continue %}{% endif %}", "{% if i == 4 %}{% break %}{% endif %}"
        assert render("{% for i in range(9) %}" + skip + stop + "{{ i }}{% endfor %}") == "023"

    def test_generation_marks_are_accepted(self):
        template = (
            "{% set x = 1 %}[{% generation %}{% set x = 2 %}{{ x }}{{ messages[0].content }}{% endgeneration %}]{{ x }}"
        )
        assert render(template) == "[2Hi]1"

    def test_strftime_now(self):
        years = {str(datetime.datetime.now().year) for _ in range(2)}
        assert render("{{ strftime_now('%Y') }}") in years

    def test_what_is_not_given(self):
        template = "{{ tools is none }} {{ documents is none }} {{ enable_thinking is defined }} {{ messages[0].name }}"
        assert render(template) == "True True False "

    def test_none_counts_as_missing(self):
        chat = [USER, {"role": "assistant", "content": None, "tool_calls": [TOOL], "name": None}]
        assert render("{% for m in messages %}{{ m | tojson }}{% endfor %}", chat) == (
            '{"role": "user", "content": "Hi"}'
            '{"role": "assistant", "tool_calls": [{"type": "function", "function": '
            '{"name": "get_time", "description": "It\'s <now> & here — é"}}]}'
        )

    @pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
    def test_thoughts_by_any_name(self, name):
        chat = [USER, {"role": "assistant", "content": "4", name: "2+2"}]
        assert render("{{ messages[1].reasoning_content }}|{{ messages[1].thinking }}", chat) == "2+2|2+2"

    def test_variables(self):
        assert (
            render("{{ enable_thinking }} {{ year + 1 }}", enable_thinking=np.bool_(False), year=2024) == "False 2025"
        )

    def test_special_tokens_are_variables(self, tokenizer):
        tokenizer = QwenTokenizer(tokenizer._tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
        tokenizer.chat_template = "{{ eos_token }} {{ pad_token }} {{ bos_token is defined }}"
        assert tokenizer.apply_chat_template([USER], tokenize=False) == "<|im_end|> <|endoftext|> False"
        assert tokenizer.apply_chat_template([USER], tokenize=False, eos_token="x") == "x <|endoftext|> False"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''['__class__'] }}",
        "{{ '' | attr('__class__') }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ messages[0].get.__self__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['os'] }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{% set x = namespace.__init__ %}",
    ],
)
def test_templates_that_reach_for_python_are_stopped(tokenizer, template):
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match="Python internals"):
        tokenizer.apply_chat_template([USER])


def test_templates_cannot_change_the_chat():
    chat = [dict(USER)]
    with pytest.raises(ChatTemplateError):
        render("{{ messages.append(1) }}", chat)
    assert chat == [USER]


def test_templates_see_no_objects():
    with pytest.raises(ValueError, match=r"template variables\['path'\] is a object"):
        render("{{ path }}", path=object())
    with pytest.raises(ValueError, match=r"messages\[0\]\['image'\]\[0\] is a ndarray"):
        render("{{ messages }}", [{**USER, "image": [np.zeros(1)]}])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}\n{{ m.content }", "not jinja, line 2"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ missing.attribute }}", "missing"),
        ("{{ messages[0].content + 1 }}", "cannot render"),
        ("{{ 1 / 0 }}", "division"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "[Rr]ange"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_templates_that_fail(template, message):
    with pytest.raises(ChatTemplateError, match=message):
        render(template)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        ("Hi", "at least one message"),
        (dict(USER), "at least one message"),
        ([USER, "Hi"], r"messages\[1\] must be a dict"),
        ([{"content": "Hi"}], r"messages\[0\]\['role'\]"),
        ([USER, {"role": 3, "content": "Hi"}], r"messages\[1\]\['role'\]"),
        ([USER, {"role": "assistant"}], r"messages\[1\]\['content'\] is missing"),
        ([{"role": "user", "content": None, "tool_calls": [TOOL]}], r"messages\[0\]\['content'\] is missing"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\['content'\] must be a str .*int 5"),
        ([USER, {"role": "assistant", "content": ["Hi"]}], r"messages\[1\]\['content'\] must be a str"),
    ],
)
def test_what_is_no_chat(tokenizer, messages, message):
    tokenizer.chat_template = CHATML
    with pytest.raises(ValueError, match=message):
        tokenizer.apply_chat_template(messages)


@pytest.mark.parametrize("tools", [[print], {"name": "f"}, "f"])
def test_tools_are_schemas(tools):
    with pytest.raises(ValueError, match="tools must be a list of JSON schemas"):
        render("{{ tools }}", tools=tools)


def test_tokenized_by_default(tokenizer):
    tokenizer.chat_template = CHATML
    text = tokenizer.apply_chat_template([USER], add_generation_prompt=True, tokenize=False)
    assert tokenizer.apply_chat_template([USER], add_generation_prompt=True) == tokenizer.encode(text)


def test_a_missing_template_says_how_to_set_one(tokenizer):
    bare = QwenTokenizer(tokenizer._tokenizer)
    assert bare.chat_template is None
    with pytest.raises(ValueError, match="set tokenizer.chat_template"):
        bare.apply_chat_template([USER])
    bare.chat_template = "now there is one"
    assert bare.apply_chat_template([USER], tokenize=False) == "now there is one"
    with pytest.raises(ValueError, match="must be jinja text"):
        bare.chat_template = 5


def test_options_that_would_be_dropped_are_refused(tokenizer):
    tokenizer.chat_template = CHATML
    with pytest.raises(ValueError, match="no option return_dict, truncation"):
        tokenizer.apply_chat_template([USER], truncation=True, return_dict=True)
