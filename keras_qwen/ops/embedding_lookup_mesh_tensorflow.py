"""`shared_embedding` on a mesh of TensorFlow's DTensor: each device looks up, and adds up, a slice of every vector."""

import tensorflow as tf

from keras_qwen.ops.placement import placed

_SLICES = ("rows", "mlp")  # whole columns, over `model`: a token's row is where the token is


def shared_embedding(table, ids):
    """(rows of table, table); see `keras_qwen.ops.embedding_lookup`."""

    @tf.custom_gradient
    def run(table):
        def backward(rows, shared):
            rows = placed(tf.cast(rows, "float32"), "batch", "length", "mlp")
            rows, indices = tf.reshape(rows, (-1, table.shape[1])), tf.reshape(ids, (-1,))
            total = placed(tf.math.unsorted_segment_sum(rows, indices, table.shape[0]), *_SLICES)
            return tf.cast(tf.cast(shared, "float32") + total, table.dtype)

        rows = tf.gather(placed(table, *_SLICES), ids)
        return (placed(rows, "batch", "length", "embed"), table), backward

    return run(table)
