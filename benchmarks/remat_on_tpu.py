"""python -m benchmarks.remat_on_tpu [POLICY ...]: what remat saves on a real accelerator, without having one.

Compiles the forward and backward pass of 16 decoder blocks (or LAYERS, from the environment) of Qwen2.5-32B's shape,
batch 8 x 4096, mixed_bfloat16, for a 2 x 8 mesh of TPU v5p, and prints the compiler's own account of a device's memory.
Needs libtpu (`pip install "jax[tpu]"`), no TPU; a JSON document comes last.
"""

import json
import os
import sys
import time

os.environ.update(TPU_SKIP_MDS_QUERY="1", JAX_PLATFORMS="cpu", KERAS_BACKEND="jax")

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import keras_qwen as kq
from keras_qwen.keras_private import abstract_variables
from keras_qwen.layers import CheckpointedDecoderBlock, RotaryEmbedding
from keras_qwen.ops import attention_backend_jax

BATCH, LENGTH = 8, 4096
LAYERS = int(os.environ.get("LAYERS", 16))
CONFIG = kq.QwenConfig(
    model_type="qwen2", vocab_size=152_064, hidden_size=5120, intermediate_size=27_648, num_hidden_layers=LAYERS,
    num_attention_heads=40, num_key_value_heads=8, rope_theta=1e6, tie_word_embeddings=False,
)  # fmt: skip
POLICIES = ("none", "mlp", "attention", "block")


def partition(path):
    """How a variable lies on the mesh: Megatron's split of attention and feed-forward over "model"."""
    layer, kind = path.split("/")[-2:]
    if layer in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
        return PartitionSpec(None, "model") if kind == "kernel" else PartitionSpec("model")
    if layer in ("o_proj", "down_proj"):
        return PartitionSpec("model", None)
    return PartitionSpec()


def compiled(policy):
    """The compiled gradient of the blocks' weights, and seconds that took."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5p:2x2x4").devices
    mesh = Mesh(np.array(devices).reshape(2, 8), ("data", "model"))
    attention_backend_jax.device = lambda: "tpu"  # what the blocks are for; they are only traced here
    remat = None if policy == "none" else policy
    with abstract_variables():
        blocks = [
            CheckpointedDecoderBlock(CONFIG, i, remat=remat, dtype="mixed_bfloat16", implementation="blockwise")
            for i in range(LAYERS)
        ]
        for block in blocks:
            block.build((BATCH, LENGTH, CONFIG.hidden_size))
        rotary = RotaryEmbedding(CONFIG.head_dim, CONFIG.rope_theta, dtype="float32")
        variables = [v for block in blocks for v in block.trainable_variables]

        def loss(values, hidden):
            with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
                rope = rotary(jnp.arange(LENGTH)[None])
                for block in blocks:
                    hidden = block(hidden, rope=rope, training=True)
            return jnp.sum(hidden.astype("float32"))

        def shape(shape, dtype, spec):
            return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

        values = [shape(tuple(v.shape), v.dtype, partition(v.path)) for v in variables]
        hidden = shape((BATCH, LENGTH, CONFIG.hidden_size), "bfloat16", PartitionSpec("data"))
        start = time.perf_counter()
        shardings = [v.sharding for v in values]
        done = jax.jit(jax.grad(loss), out_shardings=shardings).lower(values, hidden).compile()
    return done, time.perf_counter() - start


def main():
    rows = []
    for policy in sys.argv[1:] or POLICIES:
        done, seconds = compiled(policy)
        memory = done.memory_analysis()
        rows.append({"remat": policy, "temp_gb": memory.temp_size_in_bytes / 1e9, "compile_s": seconds})
        print(f"remat={policy:10} temp {memory.temp_size_in_bytes / 1e9:6.1f} GB a device, {seconds:.0f} s", flush=True)
    print(json.dumps({"layers": LAYERS, "batch": BATCH, "length": LENGTH, "rows": rows}))


if __name__ == "__main__":
    main()
