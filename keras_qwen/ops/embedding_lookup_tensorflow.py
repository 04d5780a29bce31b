"""Gradient of `shared_embedding` on TensorFlow."""

import tensorflow as tf

from keras_qwen.ops import embedding_lookup_mesh_tensorflow
from keras_qwen.ops.linear_cross_entropy_tensorflow import in_xla
from keras_qwen.ops.placement import on_dtensor


def shared_embedding(table, ids, connected):
    """(rows of table, table); see `keras_qwen.ops.embedding_lookup`."""
    if on_dtensor():
        return embedding_lookup_mesh_tensorflow.shared_embedding(tf.convert_to_tensor(table), ids)
    table = tf.convert_to_tensor(table)  # a variable would have to be a second argument of the gradient

    @tf.custom_gradient
    def run(table):
        def backward(rows, shared):
            indices, rows = tf.reshape(ids, (-1,)), tf.cast(tf.reshape(rows, (-1, table.shape[1])), "float32")
            if in_xla():
                total = tf.tensor_scatter_nd_add(tf.cast(shared, "float32"), indices[:, None], rows)
            else:
                # A scatter would copy the table's gradient. Nothing else reads it: it is the head's own, or new.
                total = tf.cast(shared, "float32") if connected else _zeros(table.shape)
                total = tf.raw_ops.InplaceAdd(x=total, i=tf.cast(indices, "int32"), v=rows)
            return tf.cast(total, table.dtype)

        return (tf.gather(table, ids), table), backward

    return run(table)


def _zeros(shape):
    # A constant would keep what is added to it until the next step.
    return tf.raw_ops.Empty(shape=shape, dtype="float32", init=True)
