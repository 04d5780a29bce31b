"""Generator: what `model.generate` does."""

from keras_qwen.generation.loop import Decoder
from keras_qwen.generation.prompts import Prompts
from keras_qwen.generation.settings import GenerationSettings
from keras_qwen.generation.stopping import Continuation


class Generator:
    """Continues prompts with a model that is given as functions; `QwenCausalLM.generate` says what and how.

    Args:
        config: `QwenConfig`.
        call_with_cache: as of `QwenBackbone`.
        head: function of hidden states (batch, length, hidden_size) that returns logits (batch, length, vocab_size).
        weights: function that returns the model's current variables.
        cache_dtype: dtype of keys and values, the model's compute dtype.
        check_length: function that is told how many tokens the longest row may get.
    """

    def __init__(self, config, *, check_length, **model):
        self.config = config
        self._check_length = check_length
        self._decoder = Decoder(config, **model)

    def generate(self, inputs, *, tokenizer=None, generation_config=None, sampler=None, stream=False, **arguments):
        """Returns the continuations of `inputs`.

        Args:
            tokenizer: a `QwenTokenizer`, or None for ids only.
            generation_config: contents of generation_config.json, or None.
            inputs, sampler, stream, **arguments: as of `QwenCausalLM.generate`.
        """
        prompts = Prompts.read(inputs, tokenizer, self.config.vocab_size)
        longest = max(len(row) for row in prompts.rows)
        if sampler is not None:
            sampler = _checked_sampler(sampler, arguments)
        settings = GenerationSettings.resolve(
            generation_config,
            prompt_length=longest,
            context_length=self.config.max_position_embeddings,
            tokenizer=tokenizer,
            **arguments,
        )
        self._check_length(longest + settings.max_new_tokens)
        pieces = self._pieces(prompts, settings, tokenizer, sampler)
        if stream:
            return _flat(pieces, prompts)
        rows = [[] for _ in prompts.rows]
        for step in pieces:
            for row, piece in zip(rows, step, strict=True):
                row.extend(piece)
        if not prompts.text:
            return rows
        return "".join(rows[0]) if prompts.single else ["".join(row) for row in rows]

    def _pieces(self, prompts, settings, tokenizer, sampler):
        """Yields for every step a list with each row's piece: text, or a list of ids."""
        rows = [Continuation(settings.stop_ids, settings.stop_strings, tokenizer, prompts.text) for _ in prompts.rows]
        for tokens in self._decoder.tokens(prompts.rows, settings, sampler):
            yield [row.push(int(token)) for row, token in zip(rows, tokens, strict=True)]
            if all(row.done for row in rows):
                return
        yield [row.finish() for row in rows]


def _flat(pieces, prompts):
    """Pieces as `stream=True` gives them out: without the empty ones, and of one prompt without the list around."""
    for step in pieces:
        if not any(step):
            continue
        if not prompts.single:
            yield step
        elif prompts.text:
            yield step[0]
        else:
            yield from step[0]


def _checked_sampler(sampler, arguments):
    replaced = [name for name in ("temperature", "top_k", "top_p", "min_p", "seed") if arguments.get(name) is not None]
    if replaced:
        raise ValueError(f"sampler takes the place of {', '.join(replaced)}: give these to the sampler instead.")
    if isinstance(sampler, str | dict):
        import keras_hub

        sampler = keras_hub.samplers.get(sampler)
    for method in ("compute_probabilities", "get_next_token"):
        if not callable(getattr(sampler, method, None)):
            raise ValueError(f"sampler must be a keras_hub.samplers.Sampler, which has {method}; not {sampler!r}.")
    return sampler
