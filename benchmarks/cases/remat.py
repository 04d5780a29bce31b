"""What recomputing saves: a training step of 8 blocks of the Qwen2.5-0.5B shape, 2 x 1024 tokens, beyond the weights"""

import time

import numpy as np

from benchmarks.cases.train_step import SHAPE
from benchmarks.measure import peak_mb, resident_mb, seconds

CONTESTANTS = ["ours on tensorflow", "ours on jax"]
X = "remat"
POINTS = [
    {"remat": "none"}, {"remat": "attention"}, {"remat": "mlp"}, {"remat": "block"},
    {"remat": "none, micro-batch 1", "micro_batch_size": 1},
]  # fmt: skip
PANELS = [("beyond_state_mb", "peak memory beyond weights and moments, MiB"), ("step_s", "seconds a step")]
SMALL_VOCABULARY = 4096  # so that the head does not hide what the blocks keep


def run(who, point):
    """Peak memory above what weights, moments and libraries take, and the median step."""
    import keras

    import keras_qwen as kq

    rows = np.random.default_rng(0).integers(0, SMALL_VOCABULARY, (2, 1025)).astype("int32")
    config = kq.QwenConfig(num_hidden_layers=8, **SHAPE | {"vocab_size": SMALL_VOCABULARY})
    remat = point["remat"] if point["remat"] in ("attention", "mlp", "block") else None
    model = kq.QwenCausalLM(config, dtype="float32", remat=remat)
    model.compile(keras.optimizers.AdamW(1e-4), micro_batch_size=point.get("micro_batch_size"))
    model.optimizer.build(model.trainable_variables)
    for variable in model.optimizer.variables:  # touch the memory of the moments, which is taken when first written
        variable.assign(variable.value * 1)
    state = resident_mb()
    step = lambda: model.train_on_batch({"token_ids": rows[:, :-1]}, rows[:, 1:])  # noqa: E731
    start = time.perf_counter()
    step()
    first = time.perf_counter() - start
    return {"step_s": seconds(step, repeats=3, warm_up=1), "first_s": first, "beyond_state_mb": peak_mb() - state}
