"""python -m benchmarks.optimizer_state: what small moments and bfloat16 weights do to the demo's loss.

Trains the demo's small model on its chats in each way, a process each, and prints the loss on the held-out chats after
every pass, the bytes of weights and moments for each parameter, and seconds a step; a JSON document comes last.
"""

import functools
import json
import os
import random
import subprocess
import sys
import time

# name -> (dtype policy, arguments of keras_qwen.training.AdamW)
WAYS = {
    "float32": ("float32", {}),
    "mixed_bfloat16": ("mixed_bfloat16", {}),
    "mixed_bfloat16, bfloat16 moments": ("mixed_bfloat16", {"moments": "bfloat16"}),
    "mixed_bfloat16, int8 moments": ("mixed_bfloat16", {"moments": "int8"}),
    "bfloat16, stochastic rounding": ("bfloat16", {"stochastic_rounding": True}),
    "bfloat16, stochastic rounding, int8 moments": ("bfloat16", {"stochastic_rounding": True, "moments": "int8"}),
    "bfloat16, rounded to nearest": ("bfloat16", {}),
}
EPOCHS = 6


def train(dtype, arguments):
    """Held-out losses, bytes a parameter, seconds a step."""
    import warnings

    import keras

    import keras_qwen as kq
    from keras_qwen.demo import recipe, rows

    warnings.simplefilter("ignore")  # that bfloat16 weights need stochastic rounding is what one of the ways shows
    keras.config.set_dtype_policy(dtype)
    random.seed(0)
    settings = recipe.Settings(epochs=EPOCHS, batch_tokens=512, learning_rate=3e-3)
    tokenizer, model = recipe.small_model(recipe.SHIPPED_CHATS, settings)
    data = rows.Rows(recipe.SHIPPED_CHATS, tokenizer, settings.batch_tokens, settings.max_length)
    start = time.perf_counter()
    optimizer = functools.partial(kq.training.AdamW, **arguments)
    _, _, held_out = recipe.fine_tune(model, data, settings, optimizer)
    seconds = (time.perf_counter() - start) / (EPOCHS * data.steps_per_epoch)
    size = lambda variables: sum(keras.ops.convert_to_numpy(v).nbytes for v in variables)  # noqa: E731
    nbytes = size(model.trainable_variables) + size(model.optimizer.variables)
    return {"held_out": held_out, "bytes_per_parameter": nbytes / model.count_params(), "step_s": seconds}


def main():
    if len(sys.argv) > 1:
        return print(json.dumps(train(*WAYS[sys.argv[1]])))
    rows = []
    for name in WAYS:
        environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}
        command = [sys.executable, "-m", "benchmarks.optimizer_state", name]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        rows.append({"way": name, **json.loads(done.stdout.splitlines()[-1])})
        row = rows[-1]
        losses = " ".join(f"{loss:6.3f}" for loss in row["held_out"])
        print(f"{name:45} {row['bytes_per_parameter']:5.2f} B a parameter, {row['step_s']:.2f} s, {losses}", flush=True)
    print(json.dumps({"epochs": EPOCHS, "rows": rows}))


if __name__ == "__main__":
    main()
