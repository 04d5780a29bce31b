# ruff: noqa: E402
"""What `test_model_parallel_tensorflow.py` compares, computed on a mesh of TensorFlow's or on one device.

    python checks_tensorflow.py FOLDER MESH CASE

FOLDER is a checkpoint, MESH a JSON dict, {} for one device, CASE a name in CASES. Prints one JSON line. A process of
its own, because devices have to be simulated before TensorFlow starts.
"""

import json
import sys
import tempfile

import tensorflow as tf

FOLDER, MESH, CASE = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
if MESH:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 4)

import keras
import numpy as np

import keras_qwen as kq

CASES = {
    "full": dict(remat="block", resume=True, distribution=dict(sequence_parallel=True, shard_optimizer=True)),
    "adapter": dict(adapter={}, micro_batch_size=4, merge=True),
    "preference": dict(adapter=dict(use_dora=True), quantization="int8", loss=kq.training.DPO(0.5)),
    "generate": dict(train=False),
}
draw = np.random.default_rng(1)


def data(config):
    ids = draw.integers(0, config.vocab_size, (16, 9)).astype("int32")
    weights = (draw.random((16, 8)) > 0.3).astype("float32")
    weights[:2] = 0.0
    segments = np.cumsum(draw.random((16, 8)) < 0.3, axis=1).astype("int32") + 1
    return {"token_ids": ids[:, :-1], "segment_ids": segments}, ids[:, 1:], weights


def numbers(model):
    return {v.path: keras.ops.convert_to_numpy(v).tolist() for v in model.trainable_variables}


def main():
    case, found = CASES[CASE], {}
    config = kq.QwenConfig.from_pretrained(FOLDER)
    if MESH:
        distribution = kq.distribution.model_parallel(config, MESH, **case.get("distribution", {}))
        keras.distribution.set_distribution(distribution)
    keras.utils.set_random_seed(0)
    model = kq.QwenCausalLM.from_pretrained(
        FOLDER, dtype="float32", remat=case.get("remat"), quantization=case.get("quantization")
    )
    if "adapter" in case:
        model.enable_lora(2, **case["adapter"])
    x, labels, weights = data(config)
    if case.get("train", True):
        how = dict(micro_batch_size=case.get("micro_batch_size"), loss=case.get("loss"))
        model.compile(keras.optimizers.AdamW(1e-2), **how)
        folder = tempfile.mkdtemp()

        def fit(epochs):
            saved = [kq.callbacks.Checkpoint(folder, every=1)] if case.get("resume") else []
            settings = dict(batch_size=8, shuffle=False, verbose=0, epochs=epochs, callbacks=saved)
            return model.fit(x, labels, sample_weight=weights, **settings).history

        found |= fit(epochs=1)
        found.pop("reward_accuracy", None)  # of the first step: of margins that are 0 but for rounding
        found["evaluate"] = model.evaluate(x, labels, sample_weight=weights, batch_size=8, verbose=0)
        found["weights"] = numbers(model)
        if MESH:
            found["split"] = split(model)
        if case.get("resume"):
            for variable in [*model.trainable_variables, *model.optimizer.variables[2:]]:
                variable.assign(variable * 0)
            found["resumed"] = fit(epochs=2)["loss"][1:]
            found["resumed weights"] = numbers(model)
        if case.get("merge"):
            model.merge_adapter()
            found["merged"] = keras.ops.convert_to_numpy(model.blocks[0].mlp.up_proj.kernel).tolist()
    else:
        few = {name: value[:3] for name, value in x.items()}  # 3 rows are not divided by the mesh
        found["predict"] = model.predict(few, verbose=0).tolist()
        found["score"] = model.score(few).tolist()
        found["call"] = keras.ops.convert_to_numpy(model(few)).tolist()
        greedy = dict(max_new_tokens=5, temperature=0)
        found["greedy"] = model.generate([[5, 6, 7], [1, 2, 3, 4]], **greedy)
        sampled = dict(max_new_tokens=5, temperature=0.8, top_k=5, top_p=0.9, seed=1, repetition_penalty=1.2)
        found["sampled"] = model.generate([[5, 6, 7], [1, 2, 3, 4]], **sampled)
    print(json.dumps(found))


def split(model):
    """Bytes on the first device, as DTensor says, of matrices and of their moments, and in all."""
    from tensorflow.experimental import dtensor

    def local(variable):
        return int(tf.size(dtensor.unpack(variable.value.read_value())[0])) * 4

    matrices = [v for v in model.trainable_variables if len(v.shape) == 2]
    moments = [v for v in model.optimizer.variables if len(v.shape) == 2]
    return {
        "all": sum(4 * int(np.prod(v.shape)) for v in matrices),
        "matrices": sum(map(local, matrices)),
        "moments": sum(map(local, moments)),
        "report": {row.path: row.device_bytes for row in kq.distribution.report(model).rows if len(row.shape) == 2},
        "local": {v.path: local(v) for v in matrices},
    }


if __name__ == "__main__":
    main()
