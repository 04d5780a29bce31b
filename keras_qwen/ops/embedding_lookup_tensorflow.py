"""Gradient of `shared_embedding` on TensorFlow."""

import tensorflow as tf


def shared_embedding(table, ids):
    """(rows of table, table); see `keras_qwen.ops.embedding_lookup`."""
    table = tf.convert_to_tensor(table)  # a variable would have to be a second argument of the gradient

    @tf.custom_gradient
    def run(table):
        def backward(rows, shared):
            # The scatter takes the memory of an argument that nothing else needs.
            total = tf.tensor_scatter_nd_add(tf.cast(shared, "float32"), ids[..., None], tf.cast(rows, "float32"))
            return tf.cast(total, table.dtype)

        return (tf.gather(table, ids), table), backward

    return run(table)
