"""`keras-qwen finetune`: what it leaves in the output folder, going on after a stop, and what it refuses."""

import csv
import json

import keras
import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

import keras_qwen as kq
from keras_qwen.checkpoint.safetensors_files import read_folder, read_header
from keras_qwen.cli import training_run
from keras_qwen.cli.app import app
from keras_qwen.cli.diagnosis import diagnose
from keras_qwen.cli.finetune_settings import Settings
from keras_qwen.cli.settings import build

ANSWER = "Salt makes the sea heavy."
LORA = "lora: {rank: 4, targets: [q_proj, v_proj]}\noptimizer: {learning_rate: 2e-2}\n"


def words(text):
    return " ".join(text.split())


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Chats, pairs and a text, each in a file."""
    folder = tmp_path_factory.mktemp("data")
    user = lambda i: {"role": "user", "content": f"The sea {i}?"}  # noqa: E731
    chats = [{"messages": [user(i), {"role": "assistant", "content": ANSWER}]} for i in range(12)]
    pairs = [{"prompt": f"The sea {i}?", "chosen": ANSWER, "rejected": "The sun."} for i in range(4)]
    for name, records in (("chats", chats), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "text.txt").write_text("The sun warms the sea. " * 60)
    return folder


def write_config(path, output, model, data):
    path.write_text(
        f"model: {model}\ndata: {data / 'chats.jsonl'}\noutput: {output}\n"
        f"epochs: 2\nsequence_length: 64\nbatch_size: 2\n{LORA}"
    )
    return path, output


@pytest.fixture
def config(tiny_folder, data, tmp_path):
    """A settings file, and the output folder it names."""
    return write_config(tmp_path / "run.yaml", tmp_path / "out", tiny_folder, data)


@pytest.fixture(scope="module")
def trained(tiny_folder, data, tmp_path_factory):
    """The result of a run with those settings, and its output folder."""
    folder = tmp_path_factory.mktemp("trained")
    path, output = write_config(folder / "run.yaml", folder / "out", tiny_folder, data)
    flags = ["--checkpoint.best", "val_loss", "--callbacks.gradient-norm", "true"]
    arguments = ["finetune", path, "--validation-data", data / "chats.jsonl", *flags]
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False), output


def adapter_values(folder):
    found = {}
    for name, tensor in read_header(folder / "adapter_model.safetensors").items():
        found[name] = np.empty(tensor.shape, tensor.dtype)
        tensor.read_into(found[name])
    return found


def test_an_adapter(trained, data, tiny_folder):
    result, output = trained
    assert result.exit_code == 0, result.stdout + result.stderr
    assert "an adapter of rank 4, 896 parameters (sft)" in words(result.stdout)
    assert f"Try it: keras-qwen chat {output / 'adapter'}" in words(result.stdout)
    assert diagnose(output / "adapter", base=tiny_folder).problems == []
    assert diagnose(output / "checkpoint" / "best", base=tiny_folder).problems == []
    assert (output / "report.png").read_bytes()[:4] == b"\x89PNG"
    with open(output / "history.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["0", "1"]
    losses = [float(row["loss"]) for row in rows]
    assert losses[1] < losses[0] and all(float(row["val_loss"]) > 0 for row in rows)
    for name in ("learning_rate", "tokens_per_second", "memory_in_use_gb", "gradient_norm/layers_1"):
        assert float(rows[0][name]) > 0
    settings = yaml.safe_load((output / "settings.yaml").read_text())
    assert settings["lora"]["rank"] == 4 and settings["packing"] == "best_fit" and settings["seed"] == 0
    model = kq.QwenCausalLM.from_pretrained(tiny_folder)
    model.compile()
    model.load_adapter(output / "adapter")
    dataset = kq.data.ChatDataset(data / "chats.jsonl", model.tokenizer, sequence_length=64, batch_size=2)
    loss = model.evaluate(dataset, verbose=0, return_dict=True)["loss"]
    np.testing.assert_allclose(loss, float(rows[1]["val_loss"]), rtol=1e-5)


class Stop(keras.callbacks.Callback):
    """Ends the program in the middle of a step."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            raise RuntimeError("killed")


def test_a_run_that_was_stopped_goes_on_to_the_same_end(shell, config, trained, monkeypatch):
    path, output = config
    callbacks = training_run.callbacks
    monkeypatch.setattr(training_run, "callbacks", lambda *a: [*callbacks(*a), Stop()])
    with pytest.raises(RuntimeError, match="killed"):
        shell("finetune", path, "--checkpoint.every", 1)
    monkeypatch.setattr(training_run, "callbacks", callbacks)
    result = shell("finetune", path, "--checkpoint.every", 1)
    assert result.exit_code == 0 and "going on after step" in result.stdout
    expected, found = adapter_values(trained[1] / "adapter"), adapter_values(output / "adapter")
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)
    result = shell("finetune", path, "--epochs", 3, "--lora.rank", 2)
    assert result.exit_code == 1
    assert f"{output} holds a run with other settings: epochs: 2 then, 3 now lora.rank: 4 then, 2 now" in words(
        result.stderr
    )


def test_the_whole_model_on_raw_text(shell, tiny_folder, data, tmp_path):
    output = tmp_path / "out"
    result = shell(
        "finetune", "--model", tiny_folder, "--data", data / "text.txt", "--output", output, "--method", "pretrain",
        "--sequence_length", 32, "--batch_size", 2, "--optimizer.learning_rate", "1e-3", "--schedule.name", "wsd",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert "the whole model, 25.2 k parameters (pretrain)" in words(result.stdout)
    assert diagnose(output / "model").problems == []
    before, after = read_folder(tiny_folder), read_folder(output / "model")
    assert before.keys() == after.keys()
    assert not any(after[name].equals(before[name]) for name in before if "proj" in name)
    assert (output / "model" / "tokenizer.json").is_file()


def test_pairs_of_answers(shell, tiny_folder, data, tmp_path):
    output = tmp_path / "out"
    result = shell(
        "finetune", "--model", tiny_folder, "--data", data / "pairs.jsonl", "--output", output, "--method", "dpo",
        "--sequence-length", 64, "--batch-size", 2, "--epochs", 4, "--lora.rank", 2, "--beta", 0.3,
        "--optimizer.learning-rate", "1e-2",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    with open(output / "history.csv", newline="") as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file)]
    assert losses[0] == pytest.approx(np.log(2), abs=0.05) and losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("content", "rates"),
    [
        ({"name": "constant", "warmup_steps": 10}, {0: 0.0, 5: 0.5, 10: 1.0, 99: 1.0}),
        ({"name": "wsd", "warmup_steps": 10, "decay_steps": 20}, {5: 0.5, 50: 1.0, 80: 1.0, 90: 0.55, 100: 0.1}),
        ({"name": "wsd"}, {0: 0.0, 3: 1.0, 80: 1.0, 100: 0.1}),
        ({"name": "cosine", "warmup_steps": 0, "final": 0.0}, {0: 1.0, 50: 0.5, 100: 0.0}),
        ({"warmup_steps": 20}, {10: 0.5, 20: 1.0, 60: 0.55, 100: 0.1}),
    ],
)
def test_schedules(content, rates):
    content = dict(model="m", data="d", output="o", optimizer={"learning_rate": 2.0}, schedule=content)
    schedule = training_run.schedule(kq, build(Settings, content, "here").resolved(), 100)
    for step, rate in rates.items():
        np.testing.assert_allclose(keras.ops.convert_to_numpy(schedule(step)), 2.0 * rate, atol=1e-6)


def test_callbacks_that_are_on(tmp_path):
    content = dict(model="m", data="d", output="o", checkpoint={"every": 5, "keep": 3})
    content["callbacks"] = {"throughput": False, "activation_statistics": True, "samples": ["The sea?"]}
    found = training_run.callbacks(kq, build(Settings, content, "here").resolved(), tmp_path)
    names = [type(callback).__name__ for callback in found]
    assert names == ["LearningRate", "DeviceMemory", "ActivationStatistics", "Samples", "Checkpoint"]
    assert found[3].prompts == [[{"role": "user", "content": "The sea?"}]]
    assert (found[4].every, found[4].states.folder, found[4].seed) == (5, tmp_path / "checkpoint", 0)


def test_refused_before_anything_is_loaded(shell, config, tmp_path):
    path, output = config
    output.mkdir()
    (output / "photo.jpg").write_text("picture")
    result = shell("finetune", path)
    assert (result.exit_code, "holds files, but no settings.yaml" in words(result.stderr)) == (1, True)
    assert [file.name for file in output.iterdir()] == ["photo.jpg"]
    result = shell("finetune", tmp_path / "nowhere.yaml")
    assert (result.exit_code, "There is no settings file" in words(result.stderr)) == (1, True)
    result = shell("finetune", path, "--lora.rnk", 3)
    assert (result.exit_code, "--lora.rank" in result.stderr) == (2, True)
    result = shell("finetune", path, "--batch-size", "many")
    assert (result.exit_code, "batch_size is 'many'; it must be int." in words(result.stderr)) == (1, True)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--data", "{tmp}/nowhere.jsonl"], "there is no file"),
        (["--data", "{tmp}/broken.jsonl"], "broken.jsonl, line 1"),
        (["--model", "{tmp}/nowhere"], "There is no folder"),
        (["--lora.targets", "[w_proj]"], "w_proj"),
        (["--sequence-length", "4"], "too_long"),
        (["--schedule.warmup-steps", "1000"], "schedule.warmup_steps is 1000; there are"),
    ],
)
def test_bad_input_leaves_no_output(flags, text, shell, config, tmp_path):
    path, output = config
    (tmp_path / "broken.jsonl").write_text("{not json\n")
    result = shell("finetune", path, *(flag.format(tmp=tmp_path) for flag in flags))
    assert result.exit_code == 1
    assert text in words(result.stderr)
    assert not output.exists()
