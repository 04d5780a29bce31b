"""What the tests of callbacks train: a model of two blocks on a few rows."""

import keras
import numpy as np

from keras_qwen import QwenCausalLM, QwenConfig

CONFIG = QwenConfig(
    model_type="qwen2", vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, initializer_range=0.3,
)  # fmt: skip
IDS = np.random.default_rng(0).integers(0, 61, (6, 8)).astype("int32")
LABELS = np.roll(IDS, -1, 1)
MASK = np.ones_like(IDS)
MASK[::2, 6:] = 0
INPUTS = {"token_ids": IDS, "padding_mask": MASK}


def fresh(optimizer=None, config=CONFIG, **compile_arguments):
    """A compiled model, the same each time."""
    keras.utils.clear_session(free_memory=False)
    model = QwenCausalLM(config, dtype="float32")
    rng = np.random.default_rng(3)
    model.set_weights([(rng.normal(0, 0.2, w.shape) + (w.ndim == 1)).astype("float32") for w in model.get_weights()])
    model.compile(optimizer or keras.optimizers.SGD(0.1), **compile_arguments)
    return model
