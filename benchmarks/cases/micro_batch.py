"""Memory follows the micro-batch, not the batch: rows of 512 tokens, 4 blocks of the Qwen2.5-0.5B shape, AdamW"""

import numpy as np

from benchmarks.cases.train_step import SHAPE
from benchmarks.measure import beyond_state_mb, seconds

CONTESTANTS = ["ours on jax", "micro-batch 1 on jax", "ours on tensorflow", "micro-batch 1 on tensorflow"]
X = "batch"
POINTS = [{"batch": 1}, {"batch": 2}, {"batch": 4}, {"batch": 8}]
PANELS = [("beyond_state_mb", "peak memory beyond weights and moments, MiB"), ("row_s", "seconds a row")]
SMALL_VOCABULARY = 4096  # so that the head does not hide what the blocks keep


def run(who, point):
    """Peak memory above what weights, moments and libraries take, and the median step divided by its rows."""
    import keras

    import keras_qwen as kq

    batch = point["batch"]
    rows = np.random.default_rng(0).integers(0, SMALL_VOCABULARY, (batch, 513)).astype("int32")
    config = kq.QwenConfig(num_hidden_layers=4, **SHAPE | {"vocab_size": SMALL_VOCABULARY})
    model = kq.QwenCausalLM(config, dtype="float32")
    model.compile(keras.optimizers.AdamW(1e-4), micro_batch_size=1 if who.startswith("micro") else None)
    step = lambda: model.train_on_batch({"token_ids": rows[:, :-1]}, rows[:, 1:])  # noqa: E731
    with beyond_state_mb(model) as beyond:
        taken = seconds(step, repeats=3)
    return {"row_s": taken / batch, "beyond_state_mb": beyond()}
