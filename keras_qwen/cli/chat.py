"""`keras-qwen chat`: talk to a model."""

import contextlib
import sys
from typing import Annotated

import typer
from rich.text import Text

from keras_qwen.cli.loading import load_model
from keras_qwen.cli.options import AdapterOption, BackendOption, DtypeOption, QuantizationOption
from keras_qwen.cli.output import console, say_error

_HELP = "/reset begins a new chat, /exit or Ctrl-D ends; Ctrl-C stops an answer."


def chat(
    model: Annotated[str, typer.Argument(help="Folder or Hub id of a model, or of an adapter.")],
    prompt: Annotated[str | None, typer.Option(help="Answer this, and end.")] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    adapter: AdapterOption = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="0 takes the likeliest token each time; default: the model's own.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(min=0, max=1, help="Draw from the likeliest tokens of so much probability.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Length of an answer at most; default: 1024, or half of the context.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Makes what is drawn reproducible.")] = None,
    dtype: DtypeOption = None,
    quantization: QuantizationOption = None,
    backend: BackendOption = None,
):
    """Talk to a model; its answers appear as they come.

    Without a terminal, each line of the input is a question of its own: echo "Why is the sky blue?" | keras-qwen chat
    MODEL
    """
    loaded = load_model(model, backend=backend, adapter=adapter, dtype=dtype, quantization=quantization)
    if loaded.tokenizer is None:
        raise ValueError(f"{model} has no tokenizer: copy tokenizer.json and tokenizer_config.json of the model there.")
    max_new_tokens = max_new_tokens or min(1024, loaded.config.max_position_embeddings // 2)
    settings = dict(temperature=temperature, top_p=top_p, max_new_tokens=max_new_tokens, seed=seed)
    conversation = Conversation(loaded, system, settings)
    if prompt is not None:
        conversation.answer(prompt)
    elif sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # input() then has a history
        console.print(Text(f"{model}. {_HELP}", "dim"))
        converse(conversation, input)
    else:
        for line in sys.stdin:
            if line.strip():
                conversation.reset()
                conversation.answer(line.strip())


class Conversation:
    """A chat so far.

    Args:
        model: a `QwenCausalLM`.
        system: the system prompt, or None.
        settings: arguments of `generate`.

    Attributes:
        messages: what was said, as chat messages.
    """

    def __init__(self, model, system, settings):
        self.model, self.system, self.settings = model, system, settings
        self.reset()

    def reset(self):
        """Forgets what was said."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def answer(self, question):
        """Writes the answer as it comes, and remembers both; what Ctrl-C stops is remembered as far as it came."""
        messages, pieces = [*self.messages, {"role": "user", "content": question}], []
        try:
            for piece in self.model.generate(messages, stream=True, **self.settings):
                pieces.append(piece)
                typer.echo(piece, nl=False)
                sys.stdout.flush()
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
        typer.echo()
        self.messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]


def converse(conversation, read):
    """Asks for questions and answers them until the end of the input.

    Args:
        conversation: a `Conversation`.
        read: called with the prompt sign, returns a line; raises EOFError or KeyboardInterrupt at the end, as `input`.
    """
    while True:
        try:
            line = read("> ").strip()
        except (EOFError, KeyboardInterrupt):
            typer.echo()
            return
        if line in ("/exit", "/quit"):
            return
        if line == "/reset":
            conversation.reset()
            console.print(Text("A new chat.", "dim"))
        elif line.startswith("/"):
            console.print(Text(f"There is no {line.split()[0]}. {_HELP}", "dim"))
        elif line:
            try:
                conversation.answer(line)
            except ValueError as problem:  # too long a chat, say: it can go on after /reset
                say_error(problem)
