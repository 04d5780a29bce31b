"""Samples: what the model writes as it learns."""

import json
from pathlib import Path

import keras


class Samples(keras.callbacks.Callback):
    """Continues fixed prompts after each epoch, prints the texts and keeps them.

    Args:
        prompts: a list of texts or of chats (lists of messages), as for `model.generate`.
        path: a .jsonl file to append to, a line `{"epoch", "prompt", "text"}` for each; None: none.
        every: epochs from one time to the next.
        **generate_arguments: of `model.generate`; by default `max_new_tokens=64, temperature=0`, so that what differs
            is the model's doing.

    Attributes:
        texts: {epoch, counted from 1: list of continuations, one a prompt}.

    Raises:
        ValueError: if there are no prompts.

    Example:
        >>> samples = kq.callbacks.Samples(["The sea is"], max_new_tokens=20)
        >>> model.fit(dataset, epochs=2, callbacks=[samples])
        >>> samples.texts[2]
        [' warm in the evening.']
    """

    def __init__(self, prompts, path=None, every=1, **generate_arguments):
        super().__init__()
        if isinstance(prompts, str) or not prompts:
            raise ValueError(f"prompts must be a list of texts or chats, not {prompts!r}.")
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ValueError(f"every must be a positive number of epochs, not {every!r}.")
        self.prompts, self.path, self.every = list(prompts), None if path is None else Path(path), every
        self.generate_arguments = {"max_new_tokens": 64, "temperature": 0, **generate_arguments}
        self.texts = {}

    def on_epoch_end(self, epoch, logs=None):
        if (epoch + 1) % self.every:
            return
        texts = self.model.generate(self.prompts, **self.generate_arguments)
        self.texts[epoch + 1] = texts
        print(f"\nEpoch {epoch + 1}:")
        for prompt, text in zip(self.prompts, texts, strict=True):
            shown = prompt if isinstance(prompt, str) else prompt[-1]["content"]
            print(f"  {shown!r}\n  -> {text!r}", flush=True)
        if self.path is not None:
            with open(self.path, "a", encoding="utf-8") as file:
                for prompt, text in zip(self.prompts, texts, strict=True):
                    line = json.dumps({"epoch": epoch + 1, "prompt": prompt, "text": text}, ensure_ascii=False)
                    print(line, file=file)
