# ruff: noqa: E402
"""Steps of Keras's optimizers on a mesh of TensorFlow's and on one device; prints the largest differences as JSON.

Run by `test_model_parallel_tensorflow.py`, because devices have to be simulated before TensorFlow starts.
"""

import json

import tensorflow as tf

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 4)

import keras
import numpy as np

import keras_qwen as kq
from keras_qwen.distribution.mesh_tensorflow import layout_of, spread
from keras_qwen.keras_private_tensorflow import deferred_assignments
from keras_qwen.ops.placement import build_optimizer
from keras_qwen.training.adamw import AdamW

CONFIG = kq.QwenConfig(
    model_type="qwen2",
    hidden_size=8,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=16,
)
MAKERS = {
    "SGD": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "Adam": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
    "AdamW": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=1.0),
    "AdamW with averages": lambda: keras.optimizers.AdamW(0.01, use_ema=True),
    "Nadam": lambda: keras.optimizers.Nadam(0.01),
    "Adamax": lambda: keras.optimizers.Adamax(0.01),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "Adadelta": lambda: keras.optimizers.Adadelta(1.0),
    "Adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "Ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "Lion": lambda: keras.optimizers.Lion(0.01, clipnorm=1.0),
    "Lamb": lambda: keras.optimizers.Lamb(0.01, clipvalue=0.5),
    "Muon": lambda: keras.optimizers.Muon(0.01),
    "keras_qwen AdamW": lambda: AdamW(keras.optimizers.schedules.CosineDecay(0.01, 10)),
    "keras_qwen AdamW, bfloat16 moments": lambda: AdamW(0.01, moments="bfloat16"),
    "keras_qwen AdamW, int8 moments": lambda: AdamW(0.01, moments="int8"),
}
STEPS = 4
SHAPES = {"kernel": (8, 32), "scale": (8,)}


def gradients(step):
    draw = np.random.default_rng(step)
    return [draw.normal(size=shape).astype("float32") * (step + 1) for shape in SHAPES.values()]


def variables():
    draw = np.random.default_rng(100)
    with keras.name_scope("layers_0"), keras.name_scope("mlp"), keras.name_scope("up_proj"):  # split by the layout map
        return [keras.Variable(draw.normal(size=shape).astype("float32"), name=name) for name, shape in SHAPES.items()]


def on_one_device(optimizer):
    trained, seen = variables(), []
    optimizer.build(trained)
    step = tf.function(lambda *g: optimizer.apply_gradients(zip(g, trained, strict=True)))
    for i in range(STEPS):
        step(*map(tf.constant, gradients(i)))
        seen.append([keras.ops.convert_to_numpy(v) for v in [*trained, *optimizer.variables]])
    return seen


def on_mesh(make, mesh):
    seen = []
    with kq.distribution.model_parallel(CONFIG, mesh, shard_optimizer=True).scope():
        distribution = keras.distribution.distribution()
        trained, optimizer = variables(), make()
        distribution.check_optimizer(optimizer)
        build_optimizer(optimizer, trained)
        layouts = [layout_of(distribution.update_layout(v)) for v in trained]

        @tf.function(autograph=False)
        def step(*given):
            with deferred_assignments():
                for variable, layout in zip(trained, layouts, strict=True):
                    variable.assign(spread(variable.value, layout))
                optimizer.apply_gradients(zip(given, trained, strict=True))

        for i in range(STEPS):
            step(*(spread(tf.constant(g), layout) for g, layout in zip(gradients(i), layouts, strict=True)))
            seen.append([keras.ops.convert_to_numpy(v) for v in [*trained, *optimizer.variables]])
    return seen


def main():
    found = {}
    for name, make in MAKERS.items():
        one = on_one_device(make())
        several = on_mesh(make, {"data": 2, "model": 2})
        found[name] = [
            max(float(np.abs(a.astype("float64") - b.astype("float64")).max()) for a, b in zip(*step, strict=True))
            for step in zip(one, several, strict=True)
        ]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
