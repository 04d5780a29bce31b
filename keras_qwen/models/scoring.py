"""ScoringMethods: how likely a language model holds each token to be."""

import keras
import numpy as np

from keras_qwen.models.freezing import RetracedFunctions
from keras_qwen.models.mesh_functions import MeshFunctions
from keras_qwen.ops.token_log_probs import token_log_probs
from keras_qwen.training.token_weights import token_weights


class ScoringMethods:
    """Mixin of `QwenCausalLM`."""

    _scorer = None

    def token_log_probs(self, inputs, labels, mask=None, training=False):
        """Log-probability of each label, as a tensor that gradients go through; no logits of the batch ever exist.

        Args:
            inputs: as of the model.
            labels: integers (batch, length), the token that follows each position; at negative ones the result is 0.
            mask: (batch, length); where it is 0, the result is 0 and the head costs nothing.
            training: whether dropout is on, and gradients can be taken.

        Returns:
            float32 tensor (batch, length).
        """
        hidden, kernel, head = self.hidden_and_head(inputs, training)
        return token_log_probs(hidden, kernel, labels, mask, training=training, **head)

    def base_log_probs(self, inputs, labels, mask=None):
        """`token_log_probs` of the base, with the adapter off; no gradient goes through them.

        Raises:
            ValueError: if no adapter is active.
        """
        if self.active_adapter is None:
            raise ValueError(
                "DPO's reference is the model with its adapter off, but no adapter is active: call enable_lora, or "
                "give the inputs `reference_log_probs` (rows,), sums of `model.score` before training."
            )
        with self.disable_adapter():
            return keras.ops.stop_gradient(self.token_log_probs(inputs, labels, mask))

    def score(self, inputs, labels=None, *, batch_size=None):
        """How likely the model holds each token to be, given those before it.

        Args:
            inputs: as of the model, arrays.
            labels: integers (rows, length), the token that follows each position; default: the next one of the row. A
                negative one does not count.
            batch_size: rows computed at once; default 32, as of `predict`.

        Returns:
            float32 array (rows, length): the natural logarithm of the probability of the token that follows each
            position, as `fit`'s labels are placed. 0 at positions that do not count: the last of a row without labels,
            of a document, and padding.

        Raises:
            ValueError: if a shape does not fit.

        Example:
            >>> model.score({"token_ids": [[9707, 11, 1879]]}).sum(axis=1)  # doctest: +SKIP
            array([-7.31], dtype=float32)
        """
        inputs = {k: v for k, v in self.complete_inputs(inputs).items() if v is not None}
        inputs = {k: keras.ops.convert_to_numpy(v) for k, v in inputs.items()}
        if labels is None:
            ids = inputs["token_ids"]
            labels = np.concatenate([ids[:, 1:], np.full_like(ids[:, :1], -100)], axis=1)
        labels = np.asarray(labels, "int32")
        mask = keras.ops.convert_to_numpy(token_weights(inputs, labels))
        if self._scorer is None:
            self._scorer = _Held(_Scorer(self))
        given = {"inputs": inputs, "labels": labels, "mask": mask}
        return self._scorer.model.predict(given, batch_size=batch_size, verbose=0)


class _Scorer(RetracedFunctions, MeshFunctions, keras.Model):
    """A model whose `predict` gives log-probabilities, batch by batch and compiled."""

    def __init__(self, model):
        super().__init__(name="scorer")
        self.model = model
        self.built = True

    def call(self, data):
        return self.model.token_log_probs(data["inputs"], data["labels"], data["mask"])

    def computation(self):
        return self.model.computation()


class _Held:
    """Hides a model that holds this one from Keras, which would look for its variables without an end."""

    def __init__(self, model):
        self.model = model
