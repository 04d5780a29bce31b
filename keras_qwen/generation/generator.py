"""Generator: what `model.generate` does."""

import functools

from keras_qwen.generation.loop import Decoder
from keras_qwen.generation.prompts import Prompts
from keras_qwen.generation.settings import GenerationSettings
from keras_qwen.generation.stopping import Continuation


class Generator:
    """Continues prompts with a model that is given as functions.

    Args:
        config: `QwenConfig`.
        call_with_cache: as of `QwenBackbone`.
        head: function of hidden states (batch, length, hidden_size) that returns logits (batch, length, vocab_size).
        weights: function that returns the model's current variables.
        cache_dtype: dtype of keys and values, the model's compute dtype.
    """

    def __init__(self, config, *, call_with_cache, head, weights, cache_dtype):
        self.config = config
        self._decoder = Decoder(config, call_with_cache, head, weights, cache_dtype)

    def generate(self, inputs, *, tokenizer=None, generation_config=None, sampler=None, stream=False, **arguments):
        """See `QwenCausalLM.generate`."""
        prompts = Prompts.read(inputs, tokenizer, self.config.vocab_size)
        settings = GenerationSettings.resolve(
            generation_config,
            prompt_length=max(len(row) for row in prompts.rows),
            context_length=self.config.max_position_embeddings,
            **arguments,
        )
        pieces = self._pieces(prompts, settings, tokenizer, sampler)
        if stream:
            return (row[0] for row in pieces) if prompts.single else pieces
        empty = "" if prompts.text else []
        rows = [functools.reduce(lambda a, b: a + b, parts, empty) for parts in zip(*pieces, strict=True)]
        rows = rows or [empty] * len(prompts.rows)
        return rows[0] if prompts.single and prompts.text else rows

    def _pieces(self, prompts, settings, tokenizer, sampler):
        rows = [
            Continuation(settings.stop_ids, settings.stop_strings, tokenizer, prompts.text) for _ in prompts.rows
        ]
        for tokens in self._decoder.tokens(prompts.rows, settings, sampler):
            yield [row.push(int(token)) for row, token in zip(rows, tokens, strict=True)]
            if all(row.done for row in rows):
                return
        yield [row.finish() for row in rows]
