"""A state that was saved on a mesh goes on there to the last bit, and on any other mesh or on one device."""

import signal

import numpy as np

SCRIPT = """
import shutil, signal
from keras_qwen.callbacks import state_folder

CONFIG = kq.QwenConfig(
    model_type="qwen2", vocab_size=280, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
    num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3,
)
ids = np.random.default_rng(0).integers(0, 61, (12, 7)).astype("int32")
folder = arguments["folder"]

class Stop(keras.callbacks.Callback):
    def __init__(self, losses, step):
        super().__init__()
        self.losses, self.step = losses, step

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(float(logs["loss"]))
        if len(self.losses) == self.step:
            raise KeyError("stop")

def train(name, mesh, stop=None, **settings):
    keras.utils.clear_session(free_memory=False)
    mesh = None if mesh is None else kq.distribution.model_parallel(CONFIG, mesh, **settings)
    keras.distribution.set_distribution(mesh)
    random.seed(7)
    model = kq.QwenCausalLM(CONFIG, dtype="float32")
    weights = np.random.default_rng(5)
    for variable in model.weights:  # Keras's own would differ from mesh to mesh
        variable.assign(weights.normal(scale=0.3, size=variable.shape).astype("float32"))
    model.compile(keras.optimizers.AdamW(keras.optimizers.schedules.CosineDecay(1e-2, 9)))
    losses = []
    checkpoint = kq.callbacks.Checkpoint(f"{folder}/{name}", every=2, weights="all")
    try:
        history = model.fit({"token_ids": ids[:, :-1]}, ids[:, 1:], batch_size=4, epochs=3, verbose=0,
                            callbacks=[Stop(losses, stop), checkpoint])
    except KeyError:
        return losses
    return {"losses": losses, "history": history.history["loss"],
            "weights": {v.path: keras.ops.convert_to_numpy(v.value).ravel().tolist() for v in model.weights}}

MESH = {"fsdp": 2, "model": 2, "data": 2}
if arguments["kill"]:
    finish, saves = state_folder._finish, []
    def killed(*call):
        saves.append(1)
        if len(saves) == 2:  # all variables are written, and not in place yet
            os.kill(os.getpid(), signal.SIGKILL)
        finish(*call)
    state_folder._finish = killed
    train("killed", MESH, shard_optimizer=True)

report(left=sorted(os.listdir(f"{folder}/killed")))
for name in ("other mesh", "one device"):
    shutil.copytree(f"{folder}/killed", f"{folder}/{name}")
report(
    straight=train("straight", MESH, shard_optimizer=True),
    same=train("killed", MESH, shard_optimizer=True),
    files=sorted(os.listdir(f"{folder}/killed")),
    other=train("other mesh", {"data": 4}),
    alone=train("one device", None),
    begun=train("begun alone", None, stop=5),
    went_on=train("begun alone", MESH),
    contents=[sorted(os.listdir(f"{folder}/{name}/step_00000009")) for name in ("killed", "one device")],
)
# What is damaged is said, not trained from.
os.truncate(f"{folder}/straight/step_00000009/variables/manifest.ocdbt", 3)
def failure(action):
    try:
        action()
    except (ValueError, OSError) as problem:
        return f"{type(problem).__name__}: {problem}"
report(damaged=failure(lambda: train("straight", MESH)))
"""


def test_a_killed_run_goes_on_anywhere(on_devices, tmp_path):
    [killed] = on_devices(SCRIPT, folder=str(tmp_path), kill=True, check=False)
    assert killed["returncode"] == -signal.SIGKILL, killed["output"]
    [found] = on_devices(SCRIPT, folder=str(tmp_path), kill=False)
    assert found["left"] == [".saving-step_00000004", "step_00000002"]  # the second one is not taken up
    assert found["files"] == ["step_00000008", "step_00000009"]
    straight = found["straight"]
    assert len(straight["losses"]) == 9
    assert found["same"]["losses"] == straight["losses"][2:]
    assert found["same"]["history"] == straight["history"]
    assert found["same"]["weights"] == straight["weights"]
    for name, steps in (("other", 2), ("alone", 2), ("went_on", 4)):
        np.testing.assert_allclose(found[name]["losses"], straight["losses"][steps:], rtol=1e-5)
        np.testing.assert_allclose(found[name]["history"], straight["history"], rtol=1e-5)
        for path, values in straight["weights"].items():
            np.testing.assert_allclose(found[name]["weights"][path], values, atol=1e-4)
    assert found["contents"] == [["state.json", "variables"], ["state.json", "variables.safetensors"]]
    assert found["damaged"].startswith("OSError") and "step_00000009" in found["damaged"]
