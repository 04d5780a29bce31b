"""Two processes with four devices each train as one with eight does, and none waits for one that is gone."""

import shutil
import signal
import time

import numpy as np
import safetensors.numpy

TRAINING = """
config = kq.QwenConfig.from_pretrained(arguments["folder"])
random.seed(3), np.random.seed(3)
distribution = kq.distribution.model_parallel(config, arguments["mesh"])
keras.distribution.set_distribution(distribution)
model = kq.QwenCausalLM.from_pretrained(arguments["folder"], dtype="float32")
rng = np.random.default_rng(1)
ids = rng.integers(0, config.vocab_size, (22, 17)).astype("int32")
weights = (rng.random((22, 16)) > 0.3).astype("float32")
inputs = {"token_ids": ids[:, :-1], "padding_mask": np.ones_like(ids[:, 1:])}
model.compile(keras.optimizers.AdamW(1e-3))
losses = []

class Losses(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        losses.append(float(logs["loss"]))

random.seed(3), np.random.seed(3)
checkpoint = kq.callbacks.Checkpoint(arguments["out"] + "/run", every=2, best="val_loss")
model.fit(inputs, ids[:, 1:], sample_weight=weights, batch_size=8, epochs=2, validation_split=0.2, verbose=0,
          callbacks=[Losses(), checkpoint])
report(losses=losses)
if not arguments["resume"]:
    model.save_pretrained(arguments["out"] + "/saved")
    logits = model.predict(inputs, batch_size=8, verbose=0)
    report(logits=[list(logits.shape), float(np.abs(logits).sum())])
    report(evaluated=model.evaluate(inputs, ids[:, 1:], sample_weight=weights, batch_size=8, verbose=0))
    tokenizer = kq.QwenTokenizer.train(["one two three four five six seven"], 270)
    records = [{"text": f"one two three {word}"} for word in ("four", "five", "six", "seven") * 3]
    of_chats = []
    for shared in (False, True):
        count = distribution.data_shard_count if shared else 1
        chats = kq.data.ChatDataset(
            records, tokenizer, sequence_length=24, batch_size=4 // count, packing=None,
            shard_index=distribution.data_shard_id if shared else 0, shard_count=count,
        )
        of_chats.append(model.evaluate(chats, verbose=0))
    report(of_chats=of_chats)
"""


def test_two_processes_train_as_one_does_and_one_goes_on(on_devices, small_checkpoint, tmp_path):
    settings = dict(folder=small_checkpoint, mesh={"fsdp": 2, "model": 2, "data": 2})
    [one] = on_devices(TRAINING, out=str(tmp_path / "one"), resume=False, **settings)
    two = on_devices(TRAINING, devices=4, processes=2, out=str(tmp_path / "two"), resume=False, **settings)
    assert len(one["losses"]) == 6
    for each in two:
        for name in ("losses", "evaluated", "of_chats"):
            np.testing.assert_allclose(each[name], one[name], rtol=1e-5)
        assert each["logits"][0] == one["logits"][0] == [22, 16, 280]
        np.testing.assert_allclose(each["logits"][1], one["logits"][1], rtol=1e-5)
    np.testing.assert_allclose(one["of_chats"][0], one["of_chats"][1], rtol=1e-5)
    for name in ("saved", "run/best"):
        first, second = (
            safetensors.numpy.load_file(tmp_path / run / name / "model.safetensors") for run in ("one", "two")
        )
        assert first.keys() == second.keys()
        for tensor in first:
            np.testing.assert_allclose(second[tensor], first[tensor], atol=1e-4)
    states = sorted(path.name for path in (tmp_path / "two" / "run").iterdir())
    assert states == ["best", "step_00000004", "step_00000006"]

    # What two processes saved in the second epoch, one process takes up on another mesh.
    shutil.rmtree(tmp_path / "two" / "run" / "step_00000006")
    settings["mesh"] = {"data": 4, "model": 2}
    [rest] = on_devices(TRAINING, out=str(tmp_path / "two"), resume=True, **settings)
    np.testing.assert_allclose(rest["losses"], one["losses"][4:], rtol=1e-5)


DYING = """
import signal, time
config = kq.QwenConfig.from_pretrained(arguments["folder"])
keras.distribution.set_distribution(kq.distribution.model_parallel(config, {"data": 8}))
model = kq.QwenCausalLM.from_pretrained(arguments["folder"], dtype="float32")
model.compile("adamw")
ids = np.ones((8, 9), "int32")

class Dying(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 2 and os.environ["KERAS_DISTRIBUTION_PROCESS_ID"] == "1":
            report(died=time.time())
            os.kill(os.getpid(), signal.SIGKILL)

model.fit({"token_ids": ids[:, :-1]}, ids[:, 1:], batch_size=8, epochs=1000, verbose=0, callbacks=[Dying()])
"""


def test_a_process_that_is_killed_stops_the_other(on_devices, small_checkpoint):
    folder = small_checkpoint
    lives, dies = on_devices(DYING, devices=4, processes=2, check=False, folder=folder)
    assert dies["returncode"] == -signal.SIGKILL
    assert time.time() - dies["died"] < 60
    assert lives["returncode"] not in (0, None)
    assert "RuntimeError: Process 0 of 2 stops, because another one has ended" in lives["output"]


DIFFERING = """
import dataclasses
def failure(action):
    try:
        action()
    except (ValueError, OSError) as problem:
        return f"{type(problem).__name__}: {problem}"

me = int(os.environ["KERAS_DISTRIBUTION_PROCESS_ID"])
config = kq.QwenConfig.from_pretrained(arguments["folder"])
other = config if me == 0 else dataclasses.replace(config, rms_norm_eps=1e-5)
parallel = kq.distribution.model_parallel
report(
    config=failure(lambda: parallel(other, {"fsdp": 8})),
    mesh=failure(lambda: parallel(config, {"fsdp": 8} if me else {"data": 8})),
    options=failure(lambda: parallel(config, {"model": 8}, sequence_parallel=bool(me))),
    part=failure(lambda: parallel(config, {"model": 4})),
)
keras.distribution.set_distribution(parallel(config, {"fsdp": 4, "model": 2}))
model = kq.QwenCausalLM.from_pretrained(arguments["folder"], dtype="float32")
model.compile(keras.optimizers.AdamW(1e-3, weight_decay=0.1 * me))
ids = np.ones((8, 9), "int32")
fit = lambda: model.fit({"token_ids": ids[:, :-1]}, ids[:, 1:], batch_size=8, verbose=0)
report(optimizer=failure(fit))
model.compile(keras.optimizers.AdamW(1e-3))
open(arguments["file"], "w").close()
report(saving=failure(lambda: model.save_pretrained(arguments["file"])))
model.enable_lora(2)
report(adapter=failure(lambda: model.save_adapter(arguments["file"])))

from keras_qwen.checkpoint import saving
write = saving.write_file
def full(path, tensors):
    write(path, tensors[:3])
    raise OSError(28, "No space left on device")
saving.write_file = full
model.merge_adapter()
report(half=failure(lambda: model.save_pretrained(arguments["file"] + "-half")))
report(left=os.listdir(os.path.dirname(arguments["file"])))
model.compile("sgd")
report(after=model.evaluate({"token_ids": ids[:, :-1]}, ids[:, 1:], batch_size=8, verbose=0))
"""


def test_differences_and_failures_are_everyones(on_devices, small_checkpoint, tmp_path):
    settings = dict(folder=small_checkpoint, file=str(tmp_path / "file"))
    for i, found in enumerate(on_devices(DIFFERING, devices=4, processes=2, **settings)):
        assert "rms_norm_eps: 1e-06 in process 0, 1e-05 in process 1" in found["config"]
        assert "mesh: [['data', 8]] in process 0, [['fsdp', 8]] in process 1" in found["mesh"]
        assert "sequence_parallel: False in process 0, True in process 1" in found["options"]
        assert "no device of the processes [1]" in found["part"]
        assert "weight_decay" in found["optimizer"] and "in process 1" in found["optimizer"]
        for name, text in (("saving", "is a file"), ("adapter", "is a file"), ("half", "No space left on device")):
            assert found[name].startswith("OSError") and text in found[name], found[name]
            assert ("The first process" in found[name]) == (i == 1)
        assert found["left"] == ["file"]
        assert np.isfinite(found["after"]).all()
