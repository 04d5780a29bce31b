"""Loading a 0.5 B checkpoint, and decoding greedily from it

The checkpoint is the folder in QWEN_CHECKPOINT; by default the one that ../shared/real_model/fetch.py makes.
"""

import os
import time
from pathlib import Path

from benchmarks.measure import peak_mb, seconds

CHECKPOINT = os.environ.get("QWEN_CHECKPOINT") or str(Path.home() / ".cache/keras_qwen/qwen2.5-coder-0.5b-instruct")
CONTESTANTS = ["ours on jax", "ours on tensorflow", "keras_hub on jax", "keras_hub on tensorflow", "transformers"]
X = "dtype"
POINTS = [{"dtype": "float32"}]
PANELS = [("load_s", "load, seconds"), ("load_mb", "memory while loading, MiB"), ("tokens_per_s", "decode, tokens / s")]
PROMPT = (
    "<|im_start|>user\nWrite a Python function that returns the n-th Fibonacci number.<|im_end|>\n"
    "<|im_start|>assistant\n"
)
TOKENS = 64


def run(who, point):
    """Load time and memory beyond the libraries, and new tokens a second."""
    load, generate = globals()["_" + who.split()[0]](point["dtype"])
    base, start = peak_mb(), time.perf_counter()
    model = load()
    loaded = dict(load_s=time.perf_counter() - start, load_mb=peak_mb() - base)
    return loaded | {"tokens_per_s": TOKENS / seconds(lambda: generate(model), repeats=5, warm_up=1)}


def _ours(dtype):
    import keras_qwen as kq

    ids = [kq.QwenTokenizer.from_pretrained(CHECKPOINT).encode(PROMPT)]
    arguments = dict(max_new_tokens=TOKENS, temperature=0.0, repetition_penalty=1.0, stop=[])
    return lambda: kq.QwenCausalLM.from_pretrained(CHECKPOINT, dtype=dtype), lambda m: m.generate(ids, **arguments)


def _keras_hub(dtype):
    import keras_hub

    def load():
        model = keras_hub.models.QwenCausalLM.from_preset(CHECKPOINT, dtype=dtype)
        model.compile(sampler="greedy")
        return model

    def generate(model):
        length = len(model.preprocessor.tokenizer(PROMPT)) + TOKENS
        model.generate(PROMPT, max_length=length, stop_token_ids=None)

    return load, generate


def _transformers(dtype):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(CHECKPOINT)(PROMPT, return_tensors="pt").input_ids

    def load():
        model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=getattr(torch, dtype)).eval()
        for parameter in model.parameters():  # the files are mapped: only this reads them
            parameter.sum()
        return model

    def generate(model):
        model.generate(ids, min_new_tokens=TOKENS, max_new_tokens=TOKENS, do_sample=False, repetition_penalty=1.0)

    return load, generate
