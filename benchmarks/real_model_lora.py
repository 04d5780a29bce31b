"""python -m benchmarks.real_model_lora CHECKPOINT OUTPUT: an adapter for a real model, trained on 200 shipped chats.

Prints trained tokens a second with packing and with padding, the loss before and after 30 steps, whether a run that was
stopped and resumed equals the straight one, and writes the adapter and the merged model to OUTPUT, with the logits and
the greedy continuation they have here, for `--check OUTPUT CHECKPOINT` to compare with peft's and transformers' (in an
environment that has them). A JSON document comes last; KERAS_BACKEND chooses the backend.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

STEPS, CHATS, TOKENS_A_STEP = 30, 200, 256
PROMPT = "Write a function that returns the square of a number."


def make_model(checkpoint):
    import keras

    import keras_qwen as kq

    keras.utils.set_random_seed(0)
    model = kq.QwenCausalLM.from_pretrained(checkpoint, dtype="float32")
    model.enable_lora(16, alpha=32)
    model.compile(kq.training.AdamW(2e-4, weight_decay=0.0, global_clipnorm=1.0))
    return model


def make_data(tokenizer, packing="best_fit", length=256, **more):
    import keras_qwen as kq
    from keras_qwen.demo import recipe

    chats = list(kq.data.read_chats(recipe.SHIPPED_CHATS))[:CHATS]
    settings = dict(sequence_length=length, batch_size=TOKENS_A_STEP // length, packing=packing) | more
    return kq.data.ChatDataset(chats, tokenizer, **settings)


def throughput(model):
    """Trained tokens a second of steps of 256 positions: packed, padded to the longest chat, in buckets by length."""
    longest = next(n for n in (64, 128, 256, 512) if n >= longest_chat(model.tokenizer))
    ways = {
        "packed": make_data(model.tokenizer),
        "padded": make_data(model.tokenizer, None, longest, bucket_lengths=[longest]),
        "buckets": make_data(model.tokenizer, None, longest),
    }
    found = {}
    for name, data in ways.items():
        batches = [batch for batch, _ in zip(data, range(6), strict=False)]
        for inputs, labels, weights in batches:  # every shape is compiled
            model.train_on_batch(inputs, labels, sample_weight=weights)
        start = time.perf_counter()
        for inputs, labels, weights in batches:
            model.train_on_batch(inputs, labels, sample_weight=weights)
        seconds = time.perf_counter() - start
        trained = sum(float(weights.sum()) for *_, weights in batches)
        found[name] = {
            "length": batches[0][1].shape[1],
            "fill_rate": data.statistics.fill_rate,
            "trained_tokens_per_second": trained / seconds,
            "step_s": seconds / len(batches),
        }
    return found


def longest_chat(tokenizer):
    import keras_qwen as kq
    from keras_qwen.demo import recipe

    chats = list(kq.data.read_chats(recipe.SHIPPED_CHATS))[:CHATS]
    return max(len(kq.data.encode_chat(tokenizer, chat["messages"])["token_ids"]) for chat in chats)


def stopped_and_resumed(checkpoint):
    """Whether a run that is stopped after 5 of 8 steps, and run again, has losses and adapter of a straight one."""
    import keras

    import keras_qwen as kq

    class Stop(Exception):
        pass

    class StopAt(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 4:
                raise Stop

    def run(folder, more=()):
        model = make_model(checkpoint)
        data = make_data(model.tokenizer, repeat=True)
        keep = kq.callbacks.Checkpoint(folder, every=2, seed=0)
        history = model.fit(data, steps_per_epoch=8, verbose=0, callbacks=[keep, *more])
        weights = [keras.ops.convert_to_numpy(v) for v in model.trainable_variables]
        return history.history["loss"], weights

    with tempfile.TemporaryDirectory() as folder:
        expected = run(f"{folder}/straight")
        try:
            run(f"{folder}/stopped", [StopAt()])
        except Stop:
            pass
        found = run(f"{folder}/stopped")
    same = all(np.array_equal(a, b) for a, b in zip(found[1], expected[1], strict=True))
    return found[0] == expected[0] and same


def main():
    if sys.argv[1] == "--check":
        return print(json.dumps(check(*sys.argv[2:])))
    import keras

    checkpoint, output = sys.argv[1], Path(sys.argv[2])
    found = {"backend": keras.backend.backend()}
    found["resumed_equals_straight"] = stopped_and_resumed(checkpoint)
    print(found, flush=True)
    model = make_model(checkpoint)
    data = make_data(model.tokenizer, repeat=True)
    print(data.statistics)
    history = model.fit(data, epochs=STEPS // 5, steps_per_epoch=5, verbose=2)
    found["losses"] = [round(loss, 4) for loss in history.history["loss"]]
    model.save_adapter(output / "adapter")
    ids = np.array([model.tokenizer.encode(PROMPT)], "int32")
    np.savez(output / "expected.npz", ids=ids, logits=keras.ops.convert_to_numpy(model({"token_ids": ids})))
    model.merge_adapter()
    model.save_pretrained(output / "merged", dtype="float32")
    continued = model.generate(ids.tolist(), max_new_tokens=24, temperature=0, stop=[])[0]
    (output / "continued.json").write_text(json.dumps([int(i) for i in continued]))
    model.unmerge_adapter()
    found["throughput"] = throughput(model)
    print(json.dumps(found))


def check(output, checkpoint):
    """What peft and transformers make of OUTPUT."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    output = Path(output)
    expected = np.load(output / "expected.npz")
    ids = torch.tensor(expected["ids"], dtype=torch.long)
    base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        logits = PeftModel.from_pretrained(base, output / "adapter").eval()(input_ids=ids).logits.numpy()
    merged = AutoModelForCausalLM.from_pretrained(output / "merged", dtype=torch.float32)
    continued = json.loads((output / "continued.json").read_text())
    found = merged.generate(ids, max_new_tokens=len(continued), do_sample=False)[0, ids.shape[1] :].tolist()
    return {
        "largest_logit_difference": float(np.abs(logits - expected["logits"]).max()),
        "continues_the_same": found == continued[: len(found)],
        "tokens": len(found),
    }


if __name__ == "__main__":
    main()
