"""What recomputing saves: a training step of 24 blocks of the Qwen2.5-0.5B shape, 1 x 1024 tokens"""

import time

import numpy as np

from benchmarks.cases.train_step import SHAPE
from benchmarks.measure import beyond_state_mb, seconds

CONTESTANTS = ["ours on tensorflow", "ours on jax"]
X = "remat"
POINTS = [{"remat": "none"}, {"remat": "attention"}, {"remat": "mlp"}, {"remat": "block"}]
PANELS = [("beyond_state_mb", "peak memory beyond weights and moments, MiB"), ("step_s", "seconds a step")]
SMALL_VOCABULARY = 4096  # so that the head does not hide what the blocks keep


def run(who, point):
    """Peak memory above what weights, moments and libraries take, and the median step."""
    import keras

    import keras_qwen as kq

    rows = np.random.default_rng(0).integers(0, SMALL_VOCABULARY, (1, 1025)).astype("int32")
    config = kq.QwenConfig(num_hidden_layers=24, **SHAPE | {"vocab_size": SMALL_VOCABULARY})
    remat = None if point["remat"] == "none" else point["remat"]
    model = kq.QwenCausalLM(config, dtype="float32", remat=remat)
    model.compile(keras.optimizers.AdamW(1e-4))
    step = lambda: model.train_on_batch({"token_ids": rows[:, :-1]}, rows[:, 1:])  # noqa: E731
    start = time.perf_counter()
    with beyond_state_mb(model) as beyond:
        step()
        first = time.perf_counter() - start
        taken = seconds(step, repeats=3, warm_up=1)
    return {"step_s": taken, "first_s": first, "beyond_state_mb": beyond()}
