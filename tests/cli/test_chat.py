"""`keras-qwen chat`: one prompt, lines of a pipe, and a conversation."""

import shutil

import keras
import pytest

import keras_qwen as kq
from keras_qwen.cli.chat import Conversation, converse

GREEDY = ["--temperature", "0", "--max-new-tokens", "5"]


def expected(folder, messages):
    return kq.QwenCausalLM.from_pretrained(folder).generate(messages, temperature=0, max_new_tokens=5)


def chat(*contents):
    return [dict(role="user" if i % 2 == 0 else "assistant", content=text) for i, text in enumerate(contents)]


def test_one_prompt(shell, tiny_folder):
    result = shell("chat", tiny_folder, "--prompt", "The sun", *GREEDY)
    assert (result.exit_code, result.stdout) == (0, expected(tiny_folder, chat("The sun")) + "\n")
    system = [{"role": "system", "content": "Salt"}, *chat("The sun")]
    result = shell("chat", tiny_folder, "--prompt", "The sun", "--system", "Salt", *GREEDY)
    assert result.stdout == expected(tiny_folder, system) + "\n"


def test_each_line_of_a_pipe_is_a_question_of_its_own(shell, tiny_folder):
    result = shell("chat", tiny_folder, *GREEDY, stdin="The sun\n\nThe sea\n")
    answers = [expected(tiny_folder, chat(line)) + "\n" for line in ("The sun", "The sea")]
    assert (result.exit_code, result.stdout) == (0, "".join(answers))


def test_a_conversation(tiny_folder, capsys):
    model = kq.QwenCausalLM.from_pretrained(tiny_folder)
    conversation = Conversation(model, None, dict(temperature=0, max_new_tokens=5))
    lines = iter(["The sun", "", "The sea", "/help", "/reset", "Salt", "/exit", "never asked"])
    converse(conversation, lambda sign: next(lines))
    first = expected(tiny_folder, chat("The sun"))
    second = expected(tiny_folder, chat("The sun", first, "The sea"))
    third = expected(tiny_folder, chat("Salt"))
    written = capsys.readouterr().out
    assert [text in written for text in (first, second, third, "There is no /help", "A new chat.")] == [True] * 5
    assert conversation.messages == chat("Salt", third)
    assert next(lines) == "never asked"


def test_the_end_of_the_input_ends_the_conversation(tiny_folder):
    def read(sign):
        raise EOFError

    conversation = Conversation(kq.QwenCausalLM.from_pretrained(tiny_folder), "Be brief.", {})
    converse(conversation, read)
    assert conversation.messages == [{"role": "system", "content": "Be brief."}]


def test_an_adapter_names_its_base(shell, tiny_folder, tmp_path):
    model = kq.QwenCausalLM.from_pretrained(tiny_folder)
    model.enable_lora(2, modules_to_save=["embed_tokens"])
    for variable in model.trainable_variables:
        variable.assign(keras.random.normal(variable.shape, seed=len(variable.path)))
    model.save_adapter(tmp_path / "adapter")
    answer = model.generate(chat("The sun"), temperature=0, max_new_tokens=5)
    assert answer != expected(tiny_folder, chat("The sun"))
    arguments = ["--prompt", "The sun", *GREEDY]
    assert shell("chat", tmp_path / "adapter", *arguments).stdout == answer + "\n"
    assert shell("chat", tiny_folder, "--adapter", tmp_path / "adapter", *arguments).stdout == answer + "\n"
    result = shell("chat", tmp_path / "adapter", "--adapter", tmp_path / "adapter", *arguments)
    assert (result.exit_code, "is an adapter itself" in result.stderr) == (1, True)


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
