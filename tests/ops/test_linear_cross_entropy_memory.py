"""linear_cross_entropy: which arrays exist, read from what the backend is going to run, and where they lie."""

import importlib
import os
import subprocess
import sys

import keras
import numpy as np
import pytest

from keras_qwen.ops import linear_cross_entropy
from keras_qwen.ops.embedding_lookup import shared_embedding

MODULE = importlib.import_module("keras_qwen.ops.linear_cross_entropy")
BACKEND = keras.backend.backend()
TOKENS, HIDDEN, VOCAB, CHUNK = 64, 32, 512, 8


@pytest.fixture(autouse=True)
def eight_pieces(monkeypatch):
    monkeypatch.setattr(MODULE, "PIECE_BYTES", 4 * HIDDEN * VOCAB // 8)


def loss(states, kernel, labels, **arguments):
    return linear_cross_entropy(states, kernel, labels, transposed=True, chunk_size=CHUNK, **arguments).loss


def computed_sizes(**arguments):
    """Numbers of elements of all that forward and backward pass compute."""
    if BACKEND == "jax":
        import jax
        from jax.extend.core import jaxprs_in_params

        def walk(jaxpr):
            for equation in jaxpr.eqns:
                yield from (variable.aval.size for variable in equation.outvars)
                for inner in jaxprs_in_params(equation.params):
                    yield from walk(inner)

        wanted = (0, 1) if arguments.get("kernel_trainable", True) else 0
        shapes = (TOKENS, HIDDEN), (VOCAB, HIDDEN), (TOKENS,)
        arrays = [jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, ("float32", "float32", "int32"), strict=True)]
        function = jax.grad(lambda *arrays: loss(*arrays, **arguments), wanted)
        return list(walk(jax.make_jaxpr(function)(*arrays).jaxpr))
    import tensorflow as tf

    @tf.function
    def function(states, kernel, labels):
        with tf.GradientTape() as tape:
            tape.watch([states, kernel])
            value = loss(states, kernel, labels, **arguments)
        return tape.gradient(value, [states, kernel] if arguments.get("kernel_trainable", True) else states)

    graph = function.get_concrete_function(
        tf.TensorSpec((TOKENS, HIDDEN)), tf.TensorSpec((VOCAB, HIDDEN)), tf.TensorSpec((TOKENS,), "int32")
    ).graph.as_graph_def(add_shapes=True)
    passed_on = {"Placeholder", "Identity", "IdentityN", "StopGradient", "While", "StatelessWhile"}
    nodes = [node for function in (graph.library.function) for node in function.node_def] + list(graph.node)
    shapes = [s for n in nodes if n.op not in passed_on for s in n.attr["_output_shapes"].list.shape]
    assert any(node.op == "MatMul" for node in nodes)
    return [int(np.prod([d.size for d in shape.dim])) for shape in shapes if not shape.unknown_rank]


@pytest.mark.skipif(BACKEND == "torch", reason="runs op by op: there is nothing to read")
def test_no_logits_of_the_batch():
    assert CHUNK * VOCAB <= max(computed_sizes()) < TOKENS * VOCAB


@pytest.mark.skipif(BACKEND == "torch", reason="runs op by op: there is nothing to read")
def test_frozen_kernel_makes_nothing_of_its_size():
    assert max(computed_sizes()) >= VOCAB * HIDDEN > max(computed_sizes(kernel_trainable=False))


@pytest.mark.skipif(BACKEND != "jax", reason="JAX says what its compiled functions allocate")
def test_compiled_memory():
    import jax

    tokens, hidden, vocab = 256, 64, 4096
    shapes = (tokens, hidden), (vocab, hidden), (tokens,)
    arrays = [jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, ("float32", "float32", "int32"), strict=True)]

    def extra(*wanted, **arguments):
        compiled = jax.jit(jax.value_and_grad(lambda *a: loss(*a, **arguments), wanted)).lower(*arrays).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    logits, kernel = 4 * CHUNK * vocab, 4 * vocab * hidden
    room = 4 * (5 * tokens * hidden) + 2 * kernel // 8  # copies of hidden, and pieces of the kernel
    # One buffer for logits, powers and slopes; none for the kernel's gradient, which is scaled where it lies.
    assert extra(0, 1) < logits + room < kernel
    assert extra(0, kernel_trainable=False) < logits + room

    def tied(ids, table):
        vectors, table = shared_embedding(table, ids)
        return loss(vectors, table, ids)

    compiled = jax.jit(jax.value_and_grad(tied, 1)).lower(arrays[2], arrays[1]).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < logits + room + 4 * tokens * hidden < kernel


SHARDED = """
import os
import re
import numpy as np, jax, keras
from jax.sharding import NamedSharding, PartitionSpec as P
from keras_qwen.ops import linear_cross_entropy

mesh = keras.distribution.DeviceMesh((2, 2), ("data", "model"), devices=keras.distribution.list_devices())
rng = np.random.default_rng(0)
states = rng.normal(size=(4, 16, 8)).astype("float32")
kernel = rng.normal(size=(64, 8)).astype("float32")
labels = rng.integers(0, 64, (4, 16)).astype("int32")
weights = (rng.random((4, 16)) < 0.5).astype("float32")

def step(states, kernel):
    loss = lambda s, k: linear_cross_entropy(s, k, labels, weights, transposed=True, chunk_size=4).loss
    return jax.value_and_grad(loss, (0, 1))(states, kernel)

value, found = jax.jit(step)(states, kernel)
layout_map = keras.distribution.LayoutMap(mesh)
with keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="data").scope():
    placed = [jax.device_put(x, NamedSharding(mesh.backend_mesh, s))
              for x, s in ((states, P("data")), (kernel, P("model")))]
    jax.clear_caches()
    compiled = jax.jit(step).lower(*placed).compile()
    spread_value, spread = compiled(*placed)
np.testing.assert_allclose(spread_value, value, rtol=1e-6)
for a, b in zip(spread, found):
    np.testing.assert_allclose(a, b, atol=1e-6)
assert [x.sharding.spec for x in spread] == [P("data"), P("model")]
text = compiled.as_text()
assert "all-gather" not in text and "all-to-all" not in text
# What crosses devices in a step belongs to tokens: 4 a device here, times the hidden size; never the vocabulary's 64.
shapes = re.findall(r"= f32\\[([0-9,]*)\\]\\S* all-reduce\\(", text)
assert shapes and max(np.prod([int(n) for n in s.split(",") if n]) for s in shapes) <= 4 * 8, shapes
"""


@pytest.mark.skipif(BACKEND != "jax", reason="Keras distributes on JAX")
def test_sharded_kernel_and_batch_stay_where_they_are():
    settings = {"KERAS_BACKEND": "jax", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    environment = {**os.environ, **settings, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    result = subprocess.run([sys.executable, "-c", SHARDED], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
