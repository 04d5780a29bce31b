"""Sums over the replicas of a `tf.distribute` strategy; without one, and outside of its replicas, nothing changes."""

import contextlib

import tensorflow as tf

from keras_qwen import keras_private_tensorflow
from keras_qwen.ops.linear_cross_entropy import TokenLoss


def summed(tensors):
    """The tensors of all replicas added up, on each of them; None stays None."""
    if _count() == 1:
        return tensors
    given = [tensor for tensor in tf.nest.flatten(tensors) if tensor is not None]
    totals = iter(tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, given))
    return tf.nest.map_structure(lambda tensor: None if tensor is None else next(totals), tensors)


def shared(sums: TokenLoss) -> TokenLoss:
    """A replica's part of sums over all of them: metrics that add up what their replicas have get the sums again."""
    return TokenLoss(*(x / _count() for x in sums)) if _count() > 1 else sums


def summed_once(optimizer):
    """A context in which the optimizer takes gradients that are summed over the replicas already."""
    return keras_private_tensorflow.summed_gradients(optimizer) if _count() > 1 else contextlib.nullcontext()


def _count():
    return tf.distribute.get_strategy().num_replicas_in_sync if tf.distribute.get_replica_context() else 1
