"""From a file of chats to rows of equal length, and the chats that are held out."""

import numpy as np

import keras_qwen as kq


class Rows:
    """Encoded chats, laid out for `fit` and `evaluate`.

    All rows of a file have one length, so that a training step is compiled once.

    Args:
        path: .jsonl file of chats. Every tenth is held out; of fewer than ten, the last.
        tokenizer: a `QwenTokenizer`.
        batch_tokens: about how many tokens a batch holds, padding included.
        max_length: chats with more tokens are left out.

    Attributes:
        train, held_out: lists of encoded chats.
        question: the first held-out chat, without its last answer.
        left_out: the number of chats longer than `max_length`.
        length: tokens in a row.
        batch_size: rows in a training batch.

    Raises:
        ValueError: a chat cannot be encoded (the message names the file and the chat), or fewer than two are left.

    Example:
        >>> rows = Rows("chats.jsonl", tokenizer, batch_tokens=2048, max_length=512)
        >>> model.evaluate(**rows.validation())
    """

    def __init__(self, path, tokenizer, batch_tokens, max_length):
        chats, examples = kq.data.read_chats(path), []
        for number, chat in enumerate(chats, start=1):
            try:
                examples.append(kq.data.encode_chat(tokenizer, chat["messages"], tools=chat.get("tools")))
            except ValueError as error:
                raise ValueError(f"{path}, chat {number}: {error}") from error
        pairs = [(chat, example) for chat, example in zip(chats, examples, strict=True)]
        pairs = [(chat, example) for chat, example in pairs if len(example["token_ids"]) <= max_length]
        if len(pairs) < 2:
            raise ValueError(
                f"{path} holds {len(pairs)} chats of at most {max_length} tokens; the demo needs one to train on and "
                "one to hold out"
            )
        self.left_out = len(chats) - len(pairs)
        held_out = pairs[9::10] or pairs[-1:]
        self.train = [example for chat, example in pairs if not any(chat is other for other, _ in held_out)]
        self.question = _without_last_answer(held_out[0][0])
        longest = max(len(example["token_ids"]) for _, example in pairs)
        self.length = -(-longest // 16) * 16
        self.batch_size = min(max(batch_tokens // self.length, 1), len(self.train))
        # Batches of one size, compiled once; what does not fill them, fewer chats than there are batches, goes.
        batches = -(-len(held_out) // self.batch_size)
        self.validation_batch_size = len(held_out) // batches
        self.held_out = [example for _, example in held_out[: batches * self.validation_batch_size]]

    @property
    def steps_per_epoch(self):
        return len(self.train) // self.batch_size

    def training(self, epochs):
        """The rows of all epochs, each epoch in an order of its own, one batch after the other.

        Returns:
            A dict of arguments for `fit`.
        """
        generator = np.random.default_rng(0)
        order = np.concatenate([generator.permutation(len(self.train)) for _ in range(epochs)])
        order = order[: epochs * self.steps_per_epoch * self.batch_size]
        inputs, labels, loss_weights = kq.data.next_token_arrays([self.train[row] for row in order], self.length)
        return {
            "x": inputs,
            "y": labels,
            "sample_weight": loss_weights,
            "batch_size": self.batch_size,
            "epochs": epochs,
            "steps_per_epoch": self.steps_per_epoch,
            "shuffle": False,
        }

    def validation(self):
        """The held-out rows, as a dict of arguments for `evaluate`."""
        inputs, labels, loss_weights = kq.data.next_token_arrays(self.held_out, self.length)
        return {"x": inputs, "y": labels, "sample_weight": loss_weights, "batch_size": self.validation_batch_size}


def _without_last_answer(chat):
    last = max(index for index, message in enumerate(chat["messages"]) if message["role"] == "assistant")
    return {**chat, "messages": chat["messages"][:last]}
