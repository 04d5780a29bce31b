"""TokenEmbedding: token ids to vectors, and back to logits where the head is tied."""

import contextlib
import types

import keras
from keras import ops

from keras_qwen.layers.lora import Adaptable
from keras_qwen.ops.embedding_lookup import embedding_lookup, shared_embedding
from keras_qwen.ops.row_matmul import row_matmul


@keras.saving.register_keras_serializable(package="keras_qwen")
class TokenEmbedding(Adaptable, keras.layers.Layer):
    """Embedding matrix whose gradient is dense and right on every backend, repeated tokens included.

    Args:
        vocab_size: number of tokens.
        hidden_size: size of a vector.
        embeddings_initializer: initialiser of the matrix.

    Call arguments:
        inputs: integers (batch, length), or with `reverse` hidden states (batch, length, hidden_size).
        reverse: multiply by the transposed matrix instead: the logits of a tied head.

    Returns:
        Tensor (batch, length, hidden_size), or (batch, length, vocab_size).

    Example:
        >>> embed = TokenEmbedding(vocab_size=100, hidden_size=8)
        >>> embed(embed(keras.ops.array([[1, 2, 3]])), reverse=True).shape
        (1, 3, 100)

    Reference: Press and Wolf, 2017, "Using the Output Embedding to Improve Language Models", arXiv:1608.05859.
    """

    weight_name = "embeddings"

    def __init__(self, vocab_size, hidden_size, embeddings_initializer="random_normal", **kwargs):
        super().__init__(**kwargs)
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.embeddings_initializer = keras.initializers.get(embeddings_initializer)
        self.supports_masking = True
        self._shared = None

    def build(self, input_shape=None):
        self.embeddings = self.add_weight(
            name="embeddings",
            shape=(self.vocab_size, self.hidden_size),
            initializer=self.embeddings_initializer,
            autocast=False,  # a lookup must not cast the whole matrix
        )

    @property
    def head(self):
        """The matrix that a tied head multiplies with."""
        return self.embeddings if self.adapter is not None and not self.adapter.ties_head else self.current_weight

    def call(self, inputs, reverse=False):
        if reverse:
            return row_matmul(inputs, ops.cast(self.head, self.compute_dtype), transposed=True)
        if self._shared is None:
            vectors = embedding_lookup(self.current_weight, inputs)
        else:
            vectors, self._shared.table = shared_embedding(self.current_weight, inputs)
        return ops.cast(vectors, self.compute_dtype)

    @contextlib.contextmanager
    def sharing(self):
        """Gives an object whose `table` the next call of the layer sets.

        A tied head that takes this matrix instead of `embeddings` shares one array of gradients with the lookup; see
        `keras_qwen.ops.embedding_lookup.shared_embedding`.
        """
        self._shared = types.SimpleNamespace(table=None)
        try:
            yield self._shared
        finally:
            self._shared = None

    def compute_output_spec(self, inputs, reverse=False):
        if reverse:
            return keras.KerasTensor((*inputs.shape[:-1], self.vocab_size), dtype=self.compute_dtype)
        return keras.KerasTensor((*inputs.shape, self.hidden_size), dtype=self.compute_dtype)

    def get_config(self):
        return {
            **super().get_config(),
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "embeddings_initializer": keras.initializers.serialize(self.embeddings_initializer),
        }
