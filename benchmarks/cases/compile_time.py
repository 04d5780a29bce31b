"""Seconds until the first training step of a small model is done, by the number of its blocks"""

import time

import numpy as np

from benchmarks.measure import peak_mb, seconds

CONTESTANTS = ["ours on jax", "scan_blocks on jax", "ours on tensorflow", "keras_hub on jax", "keras_hub on tensorflow"]
X = "blocks"
POINTS = [{"blocks": 4}, {"blocks": 16}, {"blocks": 64}]
PANELS = [("start_s", "first step beyond a later one, s"), ("peak_mb", "peak memory, MiB")]
SIZES = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128, vocab_size=256)


def run(who, point):
    """What tracing and compiling take: the first step less a later one."""
    ids = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (2, 32)).astype("int32")
    model = globals()["_" + who.split()[0]](point["blocks"])
    inputs = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
    step = lambda: model.train_on_batch(inputs, np.roll(ids, -1, 1))  # noqa: E731
    start = time.perf_counter()
    step()
    first = time.perf_counter() - start
    return {"start_s": first - seconds(step, warm_up=1), "peak_mb": peak_mb()}


def _ours(blocks, **arguments):
    import keras

    import keras_qwen as kq

    config = kq.QwenConfig(model_type="qwen2", num_hidden_layers=blocks, tie_word_embeddings=True, **SIZES)
    model = kq.QwenCausalLM(config, dtype="float32", **arguments)
    model.compile(keras.optimizers.AdamW(1e-4))
    return model


def _scan_blocks(blocks):
    return _ours(blocks, scan_blocks=True)


def _keras_hub(blocks):
    import keras
    import keras_hub

    backbone = keras_hub.models.QwenBackbone(
        vocabulary_size=SIZES["vocab_size"], num_layers=blocks, num_query_heads=SIZES["num_attention_heads"],
        num_key_value_heads=SIZES["num_key_value_heads"], hidden_dim=SIZES["hidden_size"],
        intermediate_dim=SIZES["intermediate_size"],
    )  # fmt: skip
    model = keras_hub.models.QwenCausalLM(backbone=backbone, preprocessor=None)
    model.compile(keras.optimizers.AdamW(1e-4), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model
