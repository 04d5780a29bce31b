"""product_of_made: values and gradients of the plain product, and that its left factor is not kept."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_qwen.layers import SwiGLUMLP
from keras_qwen.ops.elementwise import swiglu
from keras_qwen.ops.product_of_made import product_of_made

from .gradients import gradients

RNG = np.random.default_rng(0)
GATE, UP = (RNG.normal(0, 2, (3, 4, 10)).astype("float32") for _ in range(2))
KERNEL = RNG.normal(0, 1, (10, 6)).astype("float32")
SLOPES = RNG.normal(0, 1, (3, 4, 6)).astype("float32")


def test_value_and_gradients_are_those_of_the_product():
    def summed(product):
        return lambda gate, up, kernel: ops.sum(product(gate, up, kernel) * ops.convert_to_tensor(SLOPES))

    made = summed(lambda gate, up, kernel: product_of_made(swiglu(gate, up), kernel, swiglu, (gate, up)))
    plain = summed(lambda gate, up, kernel: ops.matmul(ops.silu(gate) * up, kernel))
    (value, found), (expected_value, expected) = (gradients(f, GATE, UP, KERNEL) for f in (made, plain))
    assert value == pytest.approx(expected_value, rel=1e-5)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="reads TensorFlow's graph")
def test_the_product_of_a_gate_is_not_kept():
    """Of the three arrays that a feed-forward network makes in the middle, the backward pass reads two."""
    import tensorflow as tf

    mlp = SwiGLUMLP(intermediate_size=7)
    mlp.build((2, 3, 5))

    @tf.function
    def step(hidden):
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(mlp(hidden, training=True))
        return tape.gradient(total, mlp.trainable_variables)

    graph = step.get_concrete_function(tf.TensorSpec((2, 3, 5))).graph
    (down,) = (op for op in graph.get_operations() if "/down_proj" in op.name and op.type == "MatMul")
    product = first_of("Mul", down.inputs[0].op)
    names, pending = set(), list(first_of("MatMul", graph.structured_outputs[2].op).inputs)  # the kernel's gradient
    while pending:
        op = pending.pop().op
        if op.name not in names:
            names.add(op.name)
            pending += op.inputs
    assert product.name not in names
    assert {name for name in names if "/gate_proj" in name} and {name for name in names if "/up_proj" in name}


def first_of(kind, op):
    """The operation of a kind that another, which changes no values, has its own from."""
    while op.type != kind:
        op = op.inputs[0].op
    return op
