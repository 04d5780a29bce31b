"""Blockwise attention: what it must not make or compute, and where it must work: remat, XLA, unknown lengths."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_qwen.ops import attention
from keras_qwen.ops.attention_blockwise import Settings, _Pairs

from .attention_reference import SEGMENTS, assert_close, inputs, reference, run, visible

only_on = {
    name: pytest.mark.skipif(keras.backend.backend() != name, reason=f"of {name}") for name in ("jax", "tensorflow")
}


def pairs(length, block_size, segments=None, window=None, causal=True):
    """For each query block, the range of key blocks that are computed."""
    tensors = [ops.convert_to_tensor(x) for x in inputs(batch=1, length=length)[:3]]
    segments = None if segments is None else ops.convert_to_tensor(np.array([segments], "int32"))
    found = _Pairs(Settings(block_size, causal, window, 1.0), tensors, (segments, segments))
    return list(zip(*(ops.convert_to_numpy(x).tolist() for x in (found.first, found.end)), strict=True))


def test_which_pairs_are_computed():
    assert pairs(8, (2, 2)) == [(0, 1), (0, 2), (0, 3), (0, 4)]
    assert pairs(8, (2, 2), causal=False) == [(0, 4)] * 4
    assert pairs(8, (4, 2)) == [(0, 2), (0, 4)]
    assert pairs(8, (2, 2), window=2) == [(0, 1), (0, 2), (1, 3), (2, 4)]
    assert pairs(8, (2, 2), window=1) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert pairs(8, (2, 2), segments=[1, 1, 1, 2, 2, 2, 3, 3]) == [(0, 1), (0, 2), (1, 3), (3, 4)]
    assert pairs(8, (2, 2), segments=[0, 0, 0, 1, 1, 1, 0, 0]) == [(0, 0), (1, 2), (1, 3), (0, 0)]
    assert pairs(5, (2, 3), window=3) == [(0, 1), (0, 2), (0, 2)]


def test_excluded_blocks_are_not_read():
    """NaN that no query may see would still spread through a product with a weight of 0."""
    query, key, value, gradient = inputs(length=16)
    key[:, :4] = np.nan
    arguments = dict(implementation="blockwise", block_size=4)
    found = run([query, key, value, gradient], sliding_window=4, **arguments)
    assert all(np.isfinite(x[:, 8:]).all() for x in found) and np.isnan(found[0][:, :4]).all()
    found = run(
        [query, key, value, gradient], np.repeat([[1, 2, 3, 4]], 4, 1).repeat(2, 0).astype("int32"), **arguments
    )
    assert all(np.isfinite(x[:, 4:]).all() for x in found) and np.isnan(found[0][:, :4]).all()


LENGTH, BLOCK = 1024, 64


def blockwise(query, key, value):
    return attention(query, key, value, implementation="blockwise", block_size=BLOCK)


@only_on["jax"]
def test_no_score_matrix_on_jax():
    import jax

    tensors = [jax.ShapeDtypeStruct(x.shape, "bfloat16") for x in inputs(batch=1, length=LENGTH, heads=4, head_dim=8)]

    def gradients(query, key, value, gradient):
        output, pull = jax.vjp(blockwise, query, key, value)
        return output, pull(gradient)

    sizes = [(x.size, str(x)) for x in intermediates(jax.make_jaxpr(gradients)(*tensors).jaxpr)]
    assert max(sizes)[0] < LENGTH * LENGTH / 8, max(sizes)
    wide = [text for size, text in sizes if text.startswith("float32") and size >= tensors[0].size]
    assert not wide, "half precision is widened block by block"
    compiled = {length: memory(gradients, tensors, length) for length in (LENGTH, 4 * LENGTH)}
    assert compiled[4 * LENGTH] <= 4.4 * compiled[LENGTH]


def memory(function, tensors, length):
    import jax

    tensors = [jax.ShapeDtypeStruct((1, length, *x.shape[2:]), x.dtype) for x in tensors]
    return jax.jit(function).lower(*tensors).compile().memory_analysis().temp_size_in_bytes


def intermediates(jaxpr):
    from jax.extend.core import jaxprs_in_params

    for equation in jaxpr.eqns:
        yield from (variable.aval for variable in equation.outvars)
        for inner in jaxprs_in_params(equation.params):
            yield from intermediates(inner)


@only_on["tensorflow"]
def test_no_score_matrix_and_no_history_on_tensorflow():
    import tensorflow as tf

    @tf.function(autograph=False)
    def gradients(query, key, value):
        with tf.GradientTape() as tape:
            tape.watch([query, key, value])
            output = blockwise(query, key, value)
        return tape.gradient(output, [query, key, value])

    tensors = [tf.zeros(x.shape) for x in inputs(batch=1, length=LENGTH, heads=4, head_dim=8)[:3]]
    graph = gradients.get_concrete_function(*tensors).graph.as_graph_def(add_shapes=True)
    nodes = [node for function in graph.library.function for node in function.node_def]
    assert sum(node.op == "StatelessWhile" for node in nodes) == 4, "two loops in each direction"
    shapes = [[d.size for d in shape.dim] for node in nodes for shape in node.attr["_output_shapes"].list.shape]
    largest = max(np.prod(shape, dtype="int64") for shape in shapes)
    assert largest < LENGTH * LENGTH / 8
    assert not [node.name for node in nodes if node.op == "TensorListPushBack"], "what a while loop's gradient keeps"


@only_on["tensorflow"]
def test_nothing_is_made_again_before_its_gradient_is_there():
    """The scores need no gradient: TensorFlow would make those of all blocks in the forward pass, and keep them."""
    import tensorflow as tf

    @tf.function
    def gradients(*tensors):
        with tf.GradientTape() as tape:
            tape.watch(tensors)
            total = tf.reduce_sum(blockwise(*tensors))
        return tape.gradient(total, tensors)

    graph = gradients.get_concrete_function(*[tf.TensorSpec((1, LENGTH, 2, 8))] * 3).graph
    forward, backward = (op for op in graph.get_operations() if "PartitionedCall" in op.type)
    again = [x.op for x in backward.inputs if x.op.type == "Identity" and x.op.control_inputs]
    assert {op.inputs[0].op for op in again} == {x.op for x in forward.inputs if x.shape.rank == 4}


@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
def test_inside_remat(compiled):
    arrays = inputs()

    def attend(query, key, value):
        return attention(
            query, key, value, segment_ids=SEGMENTS, sliding_window=5, implementation="blockwise", block_size=4
        )

    found = gradients_of(keras.remat(attend), arrays, compiled)
    assert_close(found, reference(*arrays, visible(13, SEGMENTS, 5)))


def gradients_of(function, arrays, compiled):
    """Like `run`, for any function of three tensors."""
    *tensors, gradient = (ops.convert_to_tensor(x) for x in arrays)
    if keras.backend.backend() == "jax":
        import jax

        def call(*tensors):
            output, pull = jax.vjp(function, *tensors)
            return output, *pull(gradient)

        return (jax.jit(call) if compiled else call)(*tensors)
    if keras.backend.backend() == "torch":
        import torch

        tensors = [x.detach().requires_grad_() for x in tensors]
        output = function(*tensors)
        return [x.detach().numpy() for x in (output, *torch.autograd.grad(output, tensors, gradient))]
    import tensorflow as tf

    def call(*tensors):
        with tf.GradientTape() as tape:
            tape.watch(tensors)
            output = function(*tensors)
        return output, *tape.gradient(output, tensors, output_gradients=gradient)

    return (tf.function(call, jit_compile=True, autograph=False) if compiled else call)(*tensors)


@only_on["tensorflow"]
@pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "XLA"])
def test_unknown_batch_and_length(jit_compile):
    import tensorflow as tf

    specs = [tf.TensorSpec((None, None, heads, 4)) for heads in (6, 2, 2)]

    @tf.function(input_signature=[*specs, specs[0], tf.TensorSpec((None, None), "int32")], jit_compile=jit_compile)
    def call(query, key, value, gradient, segments):
        with tf.GradientTape() as tape:
            tape.watch([query, key, value])
            output = attention(query, key, value, segment_ids=segments)
        return output, *tape.gradient(output, [query, key, value], output_gradients=gradient)

    for length in (13, 3):
        arrays = inputs(length=length)
        segments = SEGMENTS[:, 5 : 5 + length] if length < 13 else SEGMENTS
        assert_close(call(*arrays, segments), reference(*arrays, visible(length, segments)))


@only_on["jax"]
def test_under_vmap():
    import jax

    arrays = inputs()

    def one(query, key, value, segments):
        batch = [x[None] for x in (query, key, value)]
        return attention(*batch, segment_ids=segments[None], implementation="blockwise", block_size=4)[0]

    output = jax.vmap(one)(*arrays[:3], SEGMENTS)
    np.testing.assert_allclose(output, reference(*arrays, visible(13, SEGMENTS))[0], atol=1e-5)
