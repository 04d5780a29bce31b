"""What `linear_cross_entropy` needs of JAX."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from keras_qwen.ops.placement import batch_axes, batch_shards


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
    """An array for `put` and `add`."""
    return jnp.zeros(shape, dtype)


def put(total, index, value):
    """`total[index] = value`."""
    if total.shape[0] == 1:
        return value[None]
    return lax.dynamic_update_slice(total, value[None], [index, 0, 0], allow_negative_indices=False)


def add(total, index, value, axis):
    """`total[index] += value`, or `total[:, index] += value` for axis 1."""
    if total.shape[axis] == 1:
        return total + jnp.expand_dims(value, axis)
    start = [index if i == axis else 0 for i in range(3)]
    value = jnp.expand_dims(value, axis)
    # Without a correction of negative indices, which hides from XLA that both are one place.
    value += lax.dynamic_slice(total, start, value.shape, allow_negative_indices=False)
    return lax.dynamic_update_slice(total, value, start, allow_negative_indices=False)


def top(logits, labels):
    """Of each row the largest logit (rows, 1), that of the label (rows, 1), and whether argmax is the label (rows,)."""
    largest = jnp.max(logits, axis=1, keepdims=True)
    of_label = jnp.take_along_axis(logits, labels[:, None], axis=1)
    # XLA's argmax takes ten times as long as its maximum.
    earlier = lax.broadcasted_iota(labels.dtype, logits.shape, 1) < labels[:, None]
    return largest, of_label, (of_label == largest)[:, 0] & ~jnp.any(earlier & (logits == largest), axis=1)


def subtract_at(x, columns, values):
    """Subtract values (rows, 1) from x (rows, columns) at one column a row, at none where that does not exist."""
    # A comparison and not a scatter: it works where the vocabulary is spread over devices, and costs nothing here.
    return x - jnp.where(lax.broadcasted_iota(columns.dtype, x.shape, 1) == columns[:, None], values, 0.0)


def materialize(x):
    """Have x written down. XLA on CPU would compute the powers twice, for their sum without vector registers."""
    return lax.optimization_barrier(x) if _on_cpu() else x


def most(plan, steps):
    """Largest of the shards' numbers of steps: they share one loop."""
    return lax.pmax(steps, "shards") if plan.shards > 1 else steps


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def differentiable_sums(sums, plan, hidden, kernel, labels, weights):
    """(loss_sum, correct_sum), the first of them differentiable in hidden and kernel."""
    return _sums(sums, plan._replace(gradients=False, kernel_gradient=False), hidden, kernel, labels, weights)[:2]


def _forward(sums, plan, hidden, kernel, labels, weights):
    *totals, hidden_gradient, kernel_gradient = _sums(sums, plan, hidden, kernel, labels, weights)
    return tuple(totals), (hidden_gradient, kernel_gradient)


def _backward(sums, plan, gradients, cotangents):
    hidden_gradient, kernel_gradient = gradients
    scale = cotangents[0]
    hidden_gradient = (hidden_gradient * scale).astype(hidden_gradient.dtype)
    if plan.kernel_gradient:
        axis = 0 if plan.transposed else 1
        kernel_gradient = _scale(kernel_gradient, scale, axis)
        shape = (-1, kernel_gradient.shape[2]) if plan.transposed else (kernel_gradient.shape[0], -1)
        kernel_gradient = kernel_gradient.reshape(shape).astype(plan.kernel_dtype)
    return hidden_gradient, kernel_gradient, None, None


differentiable_sums.defvjp(_forward, _backward)


@partial(jax.jit, static_argnums=(0, 1))
def _sums(sums, plan, hidden, kernel, labels, weights):
    if plan.shards == 1:
        return sums(plan, hidden, kernel, labels, weights)
    hidden, labels, weights = (x.reshape(plan.shards, -1, *x.shape[1:]) for x in (hidden, labels, weights))
    over = batch_axes() if plan.shards == batch_shards() else None
    spread = jax.vmap(partial(sums, plan), in_axes=(0, None, 0, 0), axis_name="shards", spmd_axis_name=over)
    loss_sum, correct_sum, hidden_gradient, kernel_gradient = spread(hidden, kernel, labels, weights)
    if plan.gradients:
        hidden_gradient = hidden_gradient.reshape(-1, hidden_gradient.shape[-1])
    if plan.kernel_gradient:
        kernel_gradient = jnp.sum(kernel_gradient, axis=0)
    return jnp.sum(loss_sum), jnp.sum(correct_sum), hidden_gradient, kernel_gradient


def _scale(total, scale, axis):
    """`total * scale`, in the memory of total where it is accumulated in pieces; for nothing if scale is 1."""
    pieces = total.shape[axis]
    if pieces == 1:
        return total * scale
    steps = jnp.where(scale == 1.0, 0, pieces)

    def step(index, total):
        start = [index if i == axis else 0 for i in range(3)]
        shape = [1 if i == axis else size for i, size in enumerate(total.shape)]
        value = lax.dynamic_slice(total, start, shape, allow_negative_indices=False) * scale
        return index + 1, lax.dynamic_update_slice(total, value, start, allow_negative_indices=False)

    return while_loop(lambda index, _: index < steps, step, (jnp.int32(0), total))[1]
