"""The script that `test_resume.py` runs, kills, and runs again: `training_script.py FOLDER KIND [when]`.

It prints one line for each step, and writes the final weights, the losses of all steps and the history.
`when` is "step:N" to be killed (SIGKILL) after step N, or "save:N" to be killed in the middle of the N-th save.
"""

import json
import os
import random
import signal
import sys
from pathlib import Path

import keras
import numpy as np

import keras_qwen as kq
from keras_qwen.callbacks import state_folder

CONFIG = kq.QwenConfig(
    model_type="qwen2", vocab_size=280, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=1, initializer_range=0.3, attention_dropout=0.2,
)  # fmt: skip
IDS = np.random.default_rng(0).integers(0, 61, (12, 6)).astype("int32")
LABELS = np.roll(IDS, -1, 1)


class Batches(keras.utils.PyDataset):
    """Reorders its rows after each epoch, by a seed of its own."""

    def __init__(self):
        super().__init__()
        self.rng, self.rows = np.random.default_rng(5), np.arange(12)

    def __len__(self):
        return 4

    def __getitem__(self, index):
        rows = self.rows[index * 3 : index * 3 + 3]
        return {"token_ids": IDS[rows]}, LABELS[rows]

    def on_epoch_end(self):
        self.rng.shuffle(self.rows)


def tf_data():
    import tensorflow as tf

    pairs = tf.data.Dataset.from_tensor_slices(({"token_ids": IDS}, LABELS)).shuffle(12, seed=1)
    return dict(x=pairs.batch(3, drop_remainder=True).repeat(), steps_per_epoch=4, shuffle=False)


def grain_data():
    import grain

    batches = [({"token_ids": IDS[i : i + 3]}, LABELS[i : i + 3]) for i in (0, 3, 6, 9)]
    return dict(x=grain.MapDataset.source(batches).shuffle(seed=2), shuffle=False)


def chats():
    tokenizer = kq.QwenTokenizer.train(["one two three four five six seven"], 270)
    records = [{"text": f"one two three {word}"} for word in ("four", "five", "six", "seven") * 3]
    return dict(
        x=kq.data.ChatDataset(records, tokenizer, sequence_length=24, batch_size=3, packing=None), shuffle=False
    )


DATA = {
    "arrays": lambda: dict(x={"token_ids": IDS}, y=LABELS, batch_size=3),
    "PyDataset": lambda: dict(x=Batches()),
    "tf.data": tf_data,
    "grain": grain_data,
    "ChatDataset": chats,
}


class Witness(keras.callbacks.Callback):
    """Appends the loss of each step to a file at once, and pulls the trigger."""

    def __init__(self, file, when):
        super().__init__()
        self.file, self.when, self.step = file, when, 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        with open(self.file, "a") as file:
            print(self.epoch, batch, repr(logs["loss"]), repr(logs["gradient_norm"]), file=file)
        if self.when == f"step:{self.epoch * 4 + batch + 1}":
            os.kill(os.getpid(), signal.SIGKILL)


def kill_in_save(number):
    """Kills the process after the variables of the `number`-th save are written, before they are in place."""
    saves = iter(range(1, number + 1))
    write = state_folder.write_json

    def write_and_kill(path, content):
        if next(saves) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        write(path, content)

    state_folder.write_json = write_and_kill


def main(folder, kind, when="", more=()):
    keras.utils.clear_session(free_memory=False)
    random.seed(7)  # what Keras draws its seeds from
    folder = Path(folder)
    if when.startswith("save:"):
        kill_in_save(int(when[5:]))
    model = kq.QwenCausalLM(CONFIG, dtype="float32")
    schedule = keras.optimizers.schedules.CosineDecay(1e-2, 12)
    model.compile(keras.optimizers.AdamW(schedule, global_clipnorm=1.0))
    checkpoint = kq.callbacks.Checkpoint(folder / "run", every=3)
    witness = Witness(folder / "losses.txt", when)
    history = model.fit(**DATA[kind](), epochs=3, verbose=0, callbacks=[checkpoint, witness, *more])
    np.savez(folder / "weights.npz", *model.get_weights())
    (folder / "history.json").write_text(json.dumps([history.epoch, history.history]))


if __name__ == "__main__":
    main(*sys.argv[1:])
