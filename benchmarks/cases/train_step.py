"""A training step of the Qwen2.5-0.5B shape with 4 blocks, float32, AdamW, 512 tokens a batch or more"""

import numpy as np

from benchmarks.measure import matmul_gflops, peak_mb, seconds

CONTESTANTS = ["ours on jax", "ours on tensorflow", "keras_hub on jax", "keras_hub on tensorflow", "transformers"]
X = "length"
POINTS = [{"batch": 2, "length": 256}, {"batch": 1, "length": 1024}, {"batch": 1, "length": 2048}]
PANELS = [("step_s", "seconds a step"), ("peak_mb", "peak memory, MiB")]
LAYERS = 4
SHAPE = dict(
    vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_attention_heads=14, num_key_value_heads=2,
    rope_theta=1e6, rms_norm_eps=1e-6, tie_word_embeddings=True,
)  # fmt: skip


def run(who, point):
    """Median step after two warm-up steps, peak memory of the process, and how near the arithmetic floor it is."""
    rows = np.random.default_rng(0).integers(0, SHAPE["vocab_size"], (point["batch"], point["length"] + 1))
    ids, labels = rows[:, :-1].astype("int32"), rows[:, 1:].astype("int32")
    step = globals()["_" + who.split()[0]](ids, labels)
    found = {"step_s": seconds(step), "peak_mb": peak_mb()}
    if who.startswith("ours"):
        found["floor_s"] = flops(point) / matmul_gflops() / 1e9
    return found


def flops(point):
    """Multiplications and additions of a step: three products of each weight's size a token, and causal attention."""
    h, i, kv, tokens = 896, 4864, 128, point["batch"] * point["length"]
    weights = LAYERS * (2 * h * h + 2 * h * kv + 3 * h * i) + SHAPE["vocab_size"] * h
    return 6 * tokens * weights + 6 * LAYERS * tokens * point["length"] * h


def _ours(ids, labels):
    import keras

    import keras_qwen as kq

    model = kq.QwenCausalLM(kq.QwenConfig(num_hidden_layers=LAYERS, **SHAPE), dtype="float32")
    model.compile(keras.optimizers.AdamW(1e-4))
    inputs = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
    return lambda: model.train_on_batch(inputs, labels)


def _keras_hub(ids, labels):
    import keras
    import keras_hub

    backbone = keras_hub.models.QwenBackbone(
        vocabulary_size=SHAPE["vocab_size"], num_layers=LAYERS, num_query_heads=14, num_key_value_heads=2,
        hidden_dim=896, intermediate_dim=4864, rope_max_wavelength=1e6,
    )  # fmt: skip
    model = keras_hub.models.QwenCausalLM(backbone=backbone, preprocessor=None)
    model.compile(keras.optimizers.AdamW(1e-4), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    inputs = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
    return lambda: model.train_on_batch(inputs, labels)


def _transformers(ids, labels):
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(num_hidden_layers=LAYERS, attn_implementation="sdpa", use_cache=False, **SHAPE)
    model = Qwen2ForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    ids, labels = (torch.tensor(x, dtype=torch.long) for x in (ids, labels))

    def step():
        logits = model(input_ids=ids).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
