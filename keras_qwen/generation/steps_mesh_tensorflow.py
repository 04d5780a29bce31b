"""Decoding on a mesh of TensorFlow's DTensor: the model runs on the mesh, the next token is chosen on the host."""

import tensorflow as tf
from keras import ops

from keras_qwen.generation.sampling import Plan, choose
from keras_qwen.ops.placement import on_host, placed

_LOGITS = Plan(sample=False, penalty=False, logits=True)


class MeshSession:
    """One run of decoding. Other than on one device, the cache is an argument and a result, and copied at each token.

    Args:
        steps: `Steps`.
        shape: of keys and values, (batch, kv_heads, capacity, head_dim).
        dtype: of them.
        layers: how many of both.
        plan: of the choice.
        key: what a graph depends on besides its arguments' shapes.
    """

    def __init__(self, steps, shape, dtype, layers, plan, key):
        empty = placed(tf.zeros(shape, dtype), "batch", "kv_heads", "length", "head_dim")
        self._cache = [(empty, empty)] * layers
        self._steps, self._plan, self._seen, self._key = steps, plan, None, key

    def prefill(self, token_ids, segment_ids, seen, numbers):
        self._seen = seen
        token_ids, segment_ids = (placed(tf.constant(x), "batch", "length") for x in (token_ids, segment_ids))
        return self._chosen(self._logits("prefill", token_ids, segment_ids), numbers)

    def decode(self, token, index, starts, numbers):
        if self._seen is not None:
            self._seen = ops.logical_or(self._seen, ops.one_hot(token, self._seen.shape[1], dtype="bool"))
        arguments = (
            placed(tf.convert_to_tensor(token), "batch"),
            placed(tf.constant(index)),
            placed(tf.constant(starts), "batch"),
        )
        return self._chosen(self._logits("decode", *arguments), numbers)

    def _logits(self, name, *arguments):
        graph = self._steps.mesh_graph(name, (self._key, tuple(arguments[0].shape)))
        logits, self._cache = graph(self._cache, *arguments)
        return tf.convert_to_tensor(on_host(logits))

    def _chosen(self, logits, numbers):
        return choose(logits, self._seen, numbers, self._plan)


def graph_of(name, function):
    """A function of `Decoder` that returns the logits, and the cache."""

    @tf.function(autograph=False)
    def run(cache, *arguments):
        unseen = (None,) if name == "prefill" else ()
        logits, (cache, _) = function((cache, None), *arguments, *unseen, {}, _LOGITS)
        return logits, cache

    return run
