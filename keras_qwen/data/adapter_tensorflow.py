"""Batches as a `tf.data.Dataset`."""

import tensorflow as tf


def as_dataset(batches, structure, shape):
    signature = tf.nest.map_structure(lambda dtype: tf.TensorSpec(shape, dtype), structure)
    return tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=signature)
