"""Gradient of `shared_embedding` on JAX."""

import jax
import jax.numpy as jnp


@jax.custom_vjp
def shared_embedding(table, ids):
    """(rows of table, table); see `keras_qwen.ops.embedding_lookup`."""
    return jnp.take(table, ids, axis=0), table


def _forward(table, ids):
    return shared_embedding(table, ids), ids


def _backward(ids, gradients):
    rows, table = gradients
    return table.astype(jnp.float32).at[ids].add(rows.astype(jnp.float32)).astype(table.dtype), None


shared_embedding.defvjp(_forward, _backward)
