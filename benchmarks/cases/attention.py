"""Causal attention, 14 query and 2 key/value heads of 64, float32, forward and backward"""

import os

import numpy as np

from benchmarks.measure import memory_gb, peak_mb, resident_mb, seconds

CONTESTANTS = ["ours on jax", "dense on jax", "ours on tensorflow", "dense on tensorflow"]
X = "length"
POINTS = [{"length": 1024}, {"length": 2048}, {"length": 4096}, {"length": 8192}]
PANELS = [("step_s", "forward and backward, seconds"), ("extra_mb", "peak memory beyond the inputs, MiB")]


def run(who, point):
    """Time and peak memory of gradients with respect to query, key and value."""
    import keras

    from keras_qwen.ops import attention

    scores_gb = 7 * 14 * 4 * point["length"] ** 2 / 1e9  # JAX's dense gradient holds about so many arrays of scores
    if who == "dense on jax" and scores_gb > 0.9 * memory_gb():
        return {"step_s": None, "extra_mb": None}
    rng = np.random.default_rng(0)
    shapes = [(1, point["length"], heads, 64) for heads in (14, 2, 2)]
    tensors = [keras.ops.convert_to_tensor(rng.standard_normal(shape, dtype="float32")) for shape in shapes]
    chosen = "blockwise" if who.startswith("ours") else "dense"
    step = _gradients(lambda q, k, v: keras.ops.sum(attention(q, k, v, implementation=chosen) ** 2), tensors)
    base = resident_mb()
    taken = seconds(step)
    return {"step_s": taken, "extra_mb": peak_mb() - base}


def _gradients(loss, tensors):
    if os.environ["KERAS_BACKEND"] == "jax":
        import jax

        function = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
        return lambda: jax.block_until_ready(function(*tensors)) and None
    import tensorflow as tf

    @tf.function
    def function(*tensors):
        with tf.GradientTape() as tape:
            tape.watch(tensors)
            value = loss(*tensors)
        return tape.gradient(value, tensors)

    return lambda: float(function(*tensors)[0][0, 0, 0, 0]) and None
