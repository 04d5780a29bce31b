"""`keras-qwen chat`: one prompt, lines of a pipe, and a conversation."""

import shutil

import keras
import numpy as np
import pytest

import keras_qwen as kq
from keras_qwen.cli.chat import Conversation, converse
from keras_qwen.cli.loading import load_model


def chat(*contents):
    return [dict(role="user" if i % 2 == 0 else "assistant", content=text) for i, text in enumerate(contents)]


class Echo:
    """In the place of a model: answers with the question, and remembers what it was asked."""

    tokenizer = object()
    config = kq.QwenConfig(max_position_embeddings=300)

    def __init__(self):
        self.asked, self.settings = [], []

    def generate(self, messages, *, stream, **settings):
        assert stream
        self.asked.append(messages)
        self.settings.append(settings)
        yield from ("said ", messages[-1]["content"])


@pytest.fixture
def echo(monkeypatch):
    model = Echo()
    monkeypatch.setattr("keras_qwen.cli.chat.load_model", lambda *args, **kwargs: model)
    return model


def test_a_real_model_answers_as_it_does_in_python(shell, tiny_folder):
    result = shell("chat", tiny_folder, "--prompt", "The sun", "--system", "Salt", "--seed", 3, "--max-new-tokens", 8)
    model = kq.QwenCausalLM.from_pretrained(tiny_folder)
    messages = [{"role": "system", "content": "Salt"}, *chat("The sun")]
    answer = "".join(model.generate(messages, max_new_tokens=8, seed=3, stream=True))
    assert (result.exit_code, result.stdout) == (0, answer + "\n")


def test_settings_reach_generate(shell, echo):
    result = shell("chat", "m", "--prompt", "Hi", "--temperature", 0.5, "--top-p", 0.9, "--max_new_tokens", 7)
    assert (result.exit_code, result.stdout) == (0, "said Hi\n")
    assert echo.settings == [dict(temperature=0.5, top_p=0.9, max_new_tokens=7, seed=None)]
    shell("chat", "m", "--prompt", "Hi")
    assert echo.settings[1] == dict(temperature=None, top_p=None, max_new_tokens=150, seed=None)  # half of the context


def test_each_line_of_a_pipe_is_a_question_of_its_own(shell, echo):
    result = shell("chat", "m", "--system", "Be brief.", stdin="One?\n\n Two? \n")
    assert (result.exit_code, result.stdout) == (0, "said One?\nsaid Two?\n")
    system = {"role": "system", "content": "Be brief."}
    assert echo.asked == [[system, *chat("One?")], [system, *chat("Two?")]]


def test_a_conversation(echo, capsys):
    conversation = Conversation(echo, None, {})
    lines = iter(["One?", "", "Two?", "/help", "/reset", "Three?", "/exit", "never asked"])
    converse(conversation, lambda sign: next(lines))
    assert echo.asked == [chat("One?"), chat("One?", "said One?", "Two?"), chat("Three?")]
    assert conversation.messages == chat("Three?", "said Three?")
    written = capsys.readouterr().out
    assert "There is no /help. /reset begins a new chat" in written and "A new chat." in written
    assert next(lines) == "never asked"


def test_a_refused_question_does_not_end_the_conversation(echo, capsys, monkeypatch):
    def refuse(messages, **settings):
        raise ValueError("The prompt is too long.")

    conversation = Conversation(echo, None, {})
    lines = iter(["One?", "Two?", "/exit"])
    answer = echo.generate
    monkeypatch.setattr(
        echo, "generate", lambda messages, **s: (refuse if len(messages) > 1 else answer)(messages, **s)
    )
    converse(conversation, lambda sign: next(lines))
    assert conversation.messages == chat("One?", "said One?")
    assert "Error: The prompt is too long." in capsys.readouterr().err


def test_the_end_of_the_input_ends_the_conversation(echo):
    def read(sign):
        raise EOFError

    conversation = Conversation(echo, "Be brief.", {})
    converse(conversation, read)
    assert conversation.messages == [{"role": "system", "content": "Be brief."}]


def test_an_adapter_names_its_base(tiny_folder, tmp_path):
    model = kq.QwenCausalLM.from_pretrained(tiny_folder)
    model.enable_lora(2, targets=["q_proj"])
    for variable in model.trainable_variables:
        variable.assign(keras.random.normal(variable.shape, seed=1))
    model.save_adapter(tmp_path / "adapter")
    ids = np.arange(6)[None]
    logits = keras.ops.convert_to_numpy(model(ids))
    for arguments in ([tmp_path / "adapter"], [tiny_folder, tmp_path / "adapter"]):
        loaded = load_model(arguments[0], adapter=arguments[1] if len(arguments) > 1 else None)
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(loaded(ids)), logits)
    with pytest.raises(ValueError, match="is an adapter itself"):
        load_model(tmp_path / "adapter", adapter=tmp_path / "adapter")


def test_no_tokenizer(shell, reference_folder):
    result = shell("chat", reference_folder("qwen2"), "--prompt", "Hi")
    assert result.exit_code == 1
    assert "has no tokenizer: copy tokenizer.json" in " ".join(result.stderr.split())


def test_another_backend_than_the_running_one(shell, tiny_folder):
    other = "jax" if keras.backend.backend() != "jax" else "tensorflow"
    result = shell("chat", tiny_folder, "--prompt", "Hi", "--backend", other)
    assert result.exit_code == 1
    assert f"set KERAS_BACKEND={other} before" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--temperature", "-1"], "--temperature"),
        (["--backend", "numpy"], "--backend"),
        (["--max-new-tokens", "0"], "--max-new-tokens"),
        (["--frobnicate"], "--frobnicate"),
    ],
)
def test_options_out_of_range_are_usage_errors(arguments, text, shell, tiny_folder):
    result = shell("chat", tiny_folder, *arguments)
    assert (result.exit_code, text in result.stderr) == (2, True)


def test_a_damaged_checkpoint_is_named(shell, tiny_folder, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(tiny_folder, folder)
    (folder / "model.safetensors").write_bytes(b"short")
    result = shell("chat", folder, "--prompt", "Hi")
    assert result.exit_code == 1
    assert "Error:" in result.stderr and str(folder / "model.safetensors") in result.stderr
