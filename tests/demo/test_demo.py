"""The demo, on few chats and a tiny model."""

import json

import numpy as np
import pytest
from matplotlib.image import imread

import keras_qwen as kq
from keras_qwen.data.reading import read_chats
from keras_qwen.demo import __main__ as command
from keras_qwen.demo.losses import StepLosses
from keras_qwen.demo.recipe import SHIPPED_CHATS, Settings, run
from keras_qwen.demo.rows import Rows

TINY = Settings(
    epochs=3, batch_tokens=128, learning_rate=1e-2, max_length=64, vocab_size=300, hidden_size=64, num_hidden_layers=1
)


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    lines = []
    for number in range(12):
        question, answer = f"Say {number}.", f"Here is {number}."
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": turns}))
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def tokenizer(chats):
    texts = [message["content"] for chat in read_chats(chats) for message in chat["messages"]]
    return kq.QwenTokenizer.train(texts, 300)


def test_run_trains_saves_and_reloads(chats, tmp_path, capsys):
    report = run(data=chats, output=tmp_path, settings=TINY)
    printed = capsys.readouterr().out
    assert len(report.held_out_losses) == 1 + TINY.epochs
    assert report.held_out_losses[0] == pytest.approx(np.log(TINY.vocab_size), rel=0.1)  # a new model knows nothing
    assert report.held_out_losses[-1] < 0.9 * report.held_out_losses[0]
    assert report.epoch_losses[-1] < report.epoch_losses[0]
    assert min(report.step_losses[:2]) <= report.epoch_losses[0] <= max(report.step_losses)
    assert report.reload_is_equal
    assert imread(report.figure).shape[2] >= 3
    assert (report.model_folder / "config.json").is_file() and (report.model_folder / "tokenizer.json").is_file()
    for text in (str(report.figure), str(report.model_folder), f"{report.held_out_losses[-1]:.3f}", "Say 9."):
        assert text in printed

    again = run(str(report.model_folder), chats, tmp_path / "again", TINY)
    assert again.held_out_losses[0] == pytest.approx(report.held_out_losses[-1], rel=1e-4)
    assert again.reload_is_equal


def test_rows_hold_out_every_tenth_chat(chats, tokenizer):
    rows = Rows(chats, tokenizer, batch_tokens=10_000, max_length=64)
    assert (len(rows.train), len(rows.held_out), rows.left_out) == (11, 1, 0)
    assert rows.question["messages"] == [{"role": "user", "content": "Say 9."}]
    training = rows.training(epochs=2)
    assert training["x"]["token_ids"].shape == (22, rows.length) and rows.length % 16 == 0
    for epoch in np.split(training["x"]["token_ids"], 2):
        texts = {tokenizer.decode(row).split("Here is ")[1].split(".")[0] for row in epoch}
        assert texts == {str(number) for number in range(12) if number != 9}


def test_rows_leave_out_long_chats_and_need_two(chats, tokenizer, tmp_path):
    long = {"messages": [{"role": "user", "content": "go " * 200}, {"role": "assistant", "content": "No."}]}
    path = tmp_path / "chats.jsonl"
    path.write_text(chats.read_text() + "\n" + json.dumps(long))
    assert Rows(path, tokenizer, batch_tokens=64, max_length=64).left_out == 1
    path.write_text(json.dumps(long) + "\n" + chats.read_text().splitlines()[0])
    with pytest.raises(ValueError, match="chats.jsonl holds 1 chats of at most 64 tokens"):
        Rows(path, tokenizer, batch_tokens=64, max_length=64)


def test_step_losses_undo_the_running_mean():
    tokens, losses = [10, 30, 20, 5], [4.0, 3.0, 2.0, 1.0]
    callback = StepLosses(tokens)
    for epoch, steps in enumerate([(0, 1), (2, 3)]):
        callback.on_epoch_begin(epoch)
        for batch in range(len(steps)):
            seen = steps[: batch + 1]
            mean = sum(tokens[s] * losses[s] for s in seen) / sum(tokens[s] for s in seen)
            callback.on_train_batch_end(batch, {"loss": mean})
    assert callback.losses == pytest.approx(losses)


def test_bad_data_is_one_line_and_status_2(tmp_path, capsys):
    path = tmp_path / "chats.jsonl"
    path.write_text("{\n")
    assert command.main(["--data", str(path), "--output", str(tmp_path)]) == 2
    assert f"ValueError: {path}, line 1: not JSON" in capsys.readouterr().err


def test_shipped_chats():
    chats = read_chats(SHIPPED_CHATS)
    assert len(chats) >= 300
    assert len({json.dumps(chat["messages"]) for chat in chats}) == len(chats)
    for chat in chats:
        roles = [message["role"] for message in chat["messages"]]
        start = 1 if roles[0] == "system" else 0
        assert roles[start:] == ["user", "assistant"] * ((len(roles) - start) // 2)
        assert all(message["content"].strip() == message["content"] != "" for message in chat["messages"])
