# ruff: noqa: E402
"""Training with `data_parallel` on TensorFlow, in a process of its own; prints losses, logs and weights as JSON.

    python replicas_tensorflow.py FOLDER REPLICAS [STATES [DIE_AFTER]]

FOLDER is a checkpoint. REPLICAS is how many devices to simulate, or "workers" for one of the processes of TF_CONFIG.
With STATES, a folder, training is saved there after each step; with DIE_AFTER the process kills itself after so many.
"""

import json
import os
import signal
import sys

import tensorflow as tf

FOLDER, REPLICAS, *REST = sys.argv[1:]
if REPLICAS != "workers":
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * int(REPLICAS))

import contextlib

import keras
import numpy as np

import keras_qwen as kq

STATES = REST[0] if REST else None
DIE_AFTER = int(REST[1]) if len(REST) > 1 else None


class Watch(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.steps = []

    def on_train_batch_end(self, batch, logs=None):
        self.steps.append({name: float(value) for name, value in logs.items()})
        if len(self.steps) == DIE_AFTER:
            os.kill(os.getpid(), signal.SIGKILL)


def dataset(config):
    """Batches whose tokens that count are unevenly spread: none in the first rows, and the last batch is smaller."""
    draw = np.random.default_rng(1)
    rows = 24 if REPLICAS == "workers" or STATES else 21
    ids = draw.integers(0, config.vocab_size, (rows, 9)).astype("int32")
    weights = (draw.random((rows, 8)) > 0.5).astype("float32")
    weights[:4] = 0.0
    data = tf.data.Dataset.from_tensor_slices(({"token_ids": ids[:, :-1]}, ids[:, 1:], weights)).batch(8)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return data.with_options(options)


def main():
    config = kq.QwenConfig.from_pretrained(FOLDER)
    strategy = contextlib.nullcontext()
    if REPLICAS != "1":
        strategy = kq.distribution.data_parallel(config).scope()
    with strategy:
        keras.utils.set_random_seed(0)
        model = kq.QwenCausalLM.from_pretrained(FOLDER, dtype="float32")
        model.compile(keras.optimizers.AdamW(1e-3, global_clipnorm=0.5))
    watch, data = Watch(), dataset(config)
    callbacks = [watch]
    if STATES and REPLICAS == "workers":
        callbacks.append(kq.callbacks.Checkpoint(STATES, every=1))
    history = model.fit(data, epochs=2, verbose=0, callbacks=callbacks)
    found = {"history": history.history, "steps": watch.steps}
    if REPLICAS != "workers":
        found["evaluate"] = model.evaluate(data, verbose=0)
    found["weights"] = {v.path: keras.ops.convert_to_numpy(v).tolist() for v in model.trainable_variables}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
