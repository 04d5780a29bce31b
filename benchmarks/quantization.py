"""python -m benchmarks.quantization CHECKPOINT [--no-training] [KIND ...]: what quantised bases cost and save.

Loads the checkpoint in each way, a process each, and prints bits a projection weight, bytes of all variables, by how
much loading raised the resident memory at its peak, the loss on prose and on Python (this repository's), tokens a
second of greedy decoding, and with LoRA of rank 16 on all projections seconds a step of 2 x 256 tokens and the loss on
demo chats before and after 30 steps. Everything is computed in float32; KERAS_BACKEND chooses the backend. A JSON
document comes last.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.measure import peak_since_reset_mb, reset_peak, resident_mb, seconds

KINDS = ("none", "int8", "int4", "nf4")
ROOT = Path(__file__).parent.parent
TEXTS = {
    "prose": [ROOT / "benchmarks" / "prose.txt"],
    "code": [ROOT / "keras_qwen" / "ops" / "attention_blockwise.py", ROOT / "keras_qwen" / "parameters.py"],
}
LENGTH = 512
STEPS = 30


def measure(checkpoint, kind, training):
    """All figures of one way, in this process; those of training if wanted."""
    import keras
    import numpy as np

    import keras_qwen as kq

    tiny = dict(vocab_size=8, hidden_size=8, intermediate_size=8, num_attention_heads=1, num_key_value_heads=1)
    kq.QwenCausalLM(kq.QwenConfig(**tiny, num_hidden_layers=1))  # what libraries take when first used
    before = resident_mb()
    reset_peak()
    start = time.perf_counter()
    quantization = None if kind == "none" else kind
    model = kq.QwenCausalLM.from_pretrained(checkpoint, dtype="float32", quantization=quantization)
    found = {"load_s": time.perf_counter() - start, "load_peak_mb": peak_since_reset_mb() - before}
    sizes = {v.path: int(np.prod(v.shape)) * np.dtype(v.dtype).itemsize for v in model.variables}
    found["weights_mb"] = sum(sizes.values()) / 2**20
    found["resident_mb"] = resident_mb() - before
    kernels = sum(size for path, size in sizes.items() if "_proj/kernel" in path)
    rows = [row for row in model.parameter_table(model.config) if row.path.endswith("_proj/kernel")]
    found["bits"] = 8 * kernels / sum(row.size for row in rows)

    model.compile()
    tokens = {name: batches(model.tokenizer, paths) for name, paths in TEXTS.items()}
    found["tokens"] = {name: int(ids.size) for name, ids in tokens.items()}
    for name, ids in tokens.items():
        weights = np.ones(ids.shape, "float32")
        weights[:, -1] = 0
        labels = np.roll(ids, -1, axis=1)
        found[f"{name}_loss"] = model.evaluate(ids, labels, sample_weight=weights, batch_size=1, verbose=0)[0]

    prompt = tokens["prose"][0, :32].tolist()
    decode = lambda n: model.generate(prompt, max_new_tokens=n, temperature=0, stop=[])  # noqa: E731
    found["tokens_per_s"] = 32 / (seconds(lambda: decode(40), repeats=3) - seconds(lambda: decode(8), repeats=3))

    if not training:
        return found
    model.enable_lora(16, alpha=32)
    model.compile(keras.optimizers.AdamW(2e-4, weight_decay=0.0))
    reset_peak()
    ids = np.resize(tokens["code"], (2, 256))
    step = lambda: model.train_on_batch({"token_ids": ids}, np.roll(ids, -1, axis=1))  # noqa: E731
    found["step_s"] = seconds(step)
    found["step_peak_mb"] = peak_since_reset_mb() - before
    found["demo_losses"] = learn(model)
    return found


def learn(model):
    """Held-out losses on the demo's chats before and after some steps of training the adapter."""
    from keras_qwen.demo import recipe, rows

    data = rows.Rows(recipe.SHIPPED_CHATS, model.tokenizer, batch_tokens=256, max_length=512)
    losses = [model.evaluate(**data.validation(), verbose=0)[0]]
    arguments = data.training(epochs=1) | {"steps_per_epoch": min(STEPS, data.steps_per_epoch)}
    model.fit(**arguments, verbose=0)
    return [*losses, model.evaluate(**data.validation(), verbose=0)[0]]


def batches(tokenizer, paths):
    """The tokens of text files in rows."""
    import numpy as np

    ids = np.concatenate([tokenizer.encode(path.read_text(encoding="utf-8")) for path in paths]).astype("int32")
    return ids[: len(ids) // LENGTH * LENGTH].reshape(-1, LENGTH)


def main():
    checkpoint, *kinds = [argument for argument in sys.argv[1:] if argument != "--no-training"]
    training = "--no-training" not in sys.argv
    if kinds and kinds[0] == "--one":
        return print(json.dumps(measure(checkpoint, kinds[1], training)))
    rows = []
    for kind in kinds or KINDS:
        command = [sys.executable, "-m", "benchmarks.quantization", checkpoint, "--one", kind]
        command += [] if training else ["--no-training"]
        environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        row = {"quantization": kind, **json.loads(done.stdout.splitlines()[-1])}
        rows.append(row)
        line = (
            f"{kind:5} {row['bits']:5.2f} bits, weights {row['weights_mb']:6.0f} MiB, loaded in {row['load_s']:.1f} s "
            f"with a peak of {row['load_peak_mb']:.0f}; loss on prose {row['prose_loss']:.4f}, on code "
            f"{row['code_loss']:.4f}; {row['tokens_per_s']:.1f} tokens/s"
        )
        if training:
            line += (
                f"; with LoRA {row['step_s']:.2f} s a step, peak {row['step_peak_mb']:.0f} MiB, demo "
                f"{row['demo_losses'][0]:.3f} -> {row['demo_losses'][1]:.3f}"
            )
        print(line, flush=True)
    print(json.dumps({"backend": os.environ.get("KERAS_BACKEND", "tensorflow"), "rows": rows}))


if __name__ == "__main__":
    main()
