"""What `linear_cross_entropy` needs of JAX."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from keras_qwen.ops.linear_cross_entropy_loop import token_sums


def adds_in_place():
    """Whether the compiler lets a product add to its output. XLA does on accelerators."""
    return not _on_cpu()


def _on_cpu():
    return jax.default_backend() == "cpu"


def while_loop(condition, body, state):
    """Replace `state` by `body(*state)` while `condition(*state)`; its arrays are updated in place."""
    return lax.while_loop(lambda state: condition(*state), lambda state: tuple(body(*state)), tuple(state))


def product(a, b, transpose_a=False, transpose_b=False):
    """Matrix product, summed and returned in float32."""
    dimensions = ((0 if transpose_a else 1,), (1 if transpose_b else 0,)), ((), ())
    return lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


def zeros(shape, dtype):
    """Array to put and add to."""
    return jnp.zeros(shape, dtype)


def put(total, index, value):
    """`total[index] = value`."""
    return lax.dynamic_update_index_in_dim(total, value, index, 0)


def add(total, index, value):
    """`total[index] += value`."""
    return put(total, index, lax.dynamic_index_in_dim(total, index, 0, keepdims=False) + value)


def cross_entropy(logits, labels, weights, gradients):
    """Losses and hits (tokens,) of logits (tokens, vocab) float32, and the weighted gradient or None."""
    best = jnp.argmax(logits, axis=1)
    # Both in one step, so that nothing asks for the logits once the powers have taken their memory.
    chosen = jnp.take_along_axis(logits, jnp.stack([labels, best.astype(labels.dtype)], axis=1), axis=1)
    of_label, largest = chosen[:, :1], chosen[:, 1:]
    powers = jnp.exp(logits - largest)
    if _on_cpu():
        # Written down, else XLA computes them once for the sum, without vector registers, and again for the slopes.
        powers = lax.optimization_barrier(powers)
    total = jnp.sum(powers, axis=1, keepdims=True)
    losses = largest + jnp.log(total) - of_label
    if not gradients:
        return losses[:, 0], best == labels, None
    weights = weights[:, None]
    # A comparison and not a scatter: it works where the vocabulary is spread over devices.
    is_label = lax.broadcasted_iota(labels.dtype, logits.shape, 1) == labels[:, None]
    return losses[:, 0], best == labels, powers * (weights / total) - jnp.where(is_label, weights, 0.0)


def most(plan, steps):
    """Largest of the shards' numbers of steps: they share one loop."""
    return lax.pmax(steps, "shards") if plan.shards > 1 else steps


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def differentiable_sums(plan, hidden, kernel, labels, weights):
    """(loss_sum, correct_sum), the first of them differentiable in hidden and kernel."""
    return _sums(plan._replace(gradients=False, kernel_gradient=False), hidden, kernel, labels, weights)[:2]


def _forward(plan, hidden, kernel, labels, weights):
    *sums, hidden_gradient, kernel_gradient = _sums(plan, hidden, kernel, labels, weights)
    return tuple(sums), (hidden_gradient, kernel_gradient)


def _backward(plan, gradients, cotangents):
    hidden_gradient, kernel_gradient = gradients
    scale = cotangents[0]
    hidden_gradient = (hidden_gradient * scale).astype(hidden_gradient.dtype)
    if plan.kernel_gradient:
        kernel_gradient = _scale(kernel_gradient, scale).reshape(-1, kernel_gradient.shape[-1])
        kernel_gradient = kernel_gradient.astype(plan.kernel_dtype)
    return hidden_gradient, kernel_gradient, None, None


differentiable_sums.defvjp(_forward, _backward)


@partial(jax.jit, static_argnums=0)
def _sums(plan, hidden, kernel, labels, weights):
    if plan.shards == 1:
        return token_sums(plan, hidden, kernel, labels, weights)
    hidden, labels, weights = (x.reshape(plan.shards, -1, *x.shape[1:]) for x in (hidden, labels, weights))
    spread = jax.vmap(partial(token_sums, plan), in_axes=(0, None, 0, 0), axis_name="shards")
    loss_sum, correct_sum, hidden_gradient, kernel_gradient = spread(hidden, kernel, labels, weights)
    if plan.gradients:
        hidden_gradient = hidden_gradient.reshape(-1, hidden_gradient.shape[-1])
    if plan.kernel_gradient:
        kernel_gradient = jnp.sum(kernel_gradient, axis=0)
    return jnp.sum(loss_sum), jnp.sum(correct_sum), hidden_gradient, kernel_gradient


def _scale(total, scale):
    """`total * scale`, in the memory of total where it is accumulated in pieces; for nothing if scale is 1."""
    pieces = total.shape[0]
    if pieces == 1:
        return total * scale
    steps = jnp.where(scale == 1.0, 0, pieces)

    def step(index, total):
        return index + 1, put(total, index, lax.dynamic_index_in_dim(total, index, 0, keepdims=False) * scale)

    return while_loop(lambda index, _: index < steps, step, (jnp.int32(0), total))[1]
