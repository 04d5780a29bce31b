"""linear_cross_entropy beside the plain loss: 896 x 151,936 tied head, float32, value and gradients"""

import os

import numpy as np

from benchmarks.measure import peak_mb, resident_mb, seconds

CONTESTANTS = ["ours on jax", "plain keras on jax", "ours on tensorflow", "plain keras on tensorflow"]
X = "tokens"
POINTS = [{"tokens": 512}, {"tokens": 1024}, {"tokens": 2048}]
PANELS = [("step_s", "value and gradients, seconds"), ("extra_mb", "peak beyond inputs and gradients, MiB")]
HIDDEN, VOCAB = 896, 151_936


def run(who, point):
    """Time, and peak memory beyond the inputs and both gradients."""
    import keras

    from keras_qwen.ops import linear_cross_entropy

    rng, tokens = np.random.default_rng(0), point["tokens"]
    hidden = keras.ops.convert_to_tensor(rng.standard_normal((tokens, HIDDEN), dtype="float32"))
    kernel = keras.ops.convert_to_tensor(rng.standard_normal((VOCAB, HIDDEN), dtype="float32") * 0.03)
    labels = keras.ops.convert_to_tensor(rng.integers(0, VOCAB, tokens).astype("int32"))

    def ours(hidden, kernel):
        return linear_cross_entropy(hidden, kernel, labels, transposed=True).loss

    def plain(hidden, kernel):
        logits = keras.ops.matmul(hidden, keras.ops.transpose(kernel))
        if keras.backend.backend() == "jax":  # keras's own makes a one-hot matrix here; this is what people write
            picked = keras.ops.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
            return keras.ops.mean(keras.ops.logsumexp(logits, axis=1) - picked)
        return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True))

    step = _gradients(ours if who.startswith("ours") else plain, hidden, kernel)
    base = resident_mb()
    taken = seconds(step)
    gradients = (VOCAB * HIDDEN + tokens * HIDDEN) * 4 / 2**20
    return {"step_s": taken, "extra_mb": peak_mb() - base - gradients}


def _gradients(loss, hidden, kernel):
    if os.environ["KERAS_BACKEND"] == "jax":
        import jax

        function = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
        return lambda: jax.block_until_ready(function(hidden, kernel)) and None
    import tensorflow as tf

    @tf.function
    def function(hidden, kernel):
        with tf.GradientTape() as tape:
            tape.watch([hidden, kernel])
            value = loss(hidden, kernel)
        return value, tape.gradient(value, [hidden, kernel])

    return lambda: float(function(hidden, kernel)[0]) and None
