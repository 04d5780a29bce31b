"""ResizingMethods: room in the vocabulary for tokens of one's own."""

import dataclasses

import keras
from keras import ops

from keras_qwen import keras_private


class ResizingMethods:
    """Mixin of `QwenCausalLM`."""

    def resize_token_embeddings(self, new_num_tokens, pad_to_multiple_of=None):
        """Changes the size of the vocabulary: of embeddings, head and config.

        New rows are the mean of the old ones, so that new tokens start as likely as the average one. Where the
        vocabulary shrinks, the last rows go.

        Args:
            new_num_tokens: size of the vocabulary, `len(tokenizer)` for what a tokenizer knows.
            pad_to_multiple_of: round up to a multiple of this, which is faster on some devices.

        Returns:
            The new size.

        Raises:
            ValueError: for a size that is not positive, and if an adapter has a copy of the embeddings or the head.

        Example:
            >>> model.resize_token_embeddings(151_700, pad_to_multiple_of=64)
            151744
        """
        for name, value in {"new_num_tokens": new_num_tokens, "pad_to_multiple_of": pad_to_multiple_of or 1}.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive integer, not {value!r}.")
        step = pad_to_multiple_of or 1
        size = -(-new_num_tokens // step) * step
        embed, head = self.backbone.embed_tokens, self.lm_head
        for layer in (embed, head):
            if layer is not None and layer.adapters:
                raise ValueError(
                    f"The adapter {next(iter(layer.adapters))!r} has a copy of {layer.name} of the old size: resize "
                    f"before enable_lora, or delete_adapter first."
                )
        if size == self.config.vocab_size:
            return size
        _resize(embed, "embeddings", size, axis=0)
        embed.vocab_size = size
        if head is not None:
            _resize(head, "_kernel", size, axis=1)
            head.units = size
        for model in (self, self.backbone):
            model.config = dataclasses.replace(model.config, vocab_size=size)
            model.train_function = model.test_function = model.predict_function = None
        for output in self.outputs:
            keras_private.set_symbolic_shape(output, (*output.shape[:-1], size))
        self._generator = self._scorer = None
        return size


def _resize(layer, attribute, size, axis):
    old = getattr(layer, attribute)
    values = ops.convert_to_tensor(old)
    before = values.shape[axis]
    kept = ops.take(values, range(size), axis=axis) if size < before else values
    if size > before:
        mean = ops.cast(ops.mean(ops.cast(values, "float32"), axis=axis, keepdims=True), values.dtype)
        kept = ops.concatenate([kept, ops.repeat(mean, size - before, axis=axis)], axis=axis)
    with keras.name_scope(layer.name, caller=layer):
        keras_private.replace_variable(layer, attribute, kept)
