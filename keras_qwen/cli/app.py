"""The shell `keras-qwen`: its commands, and what becomes of their errors."""

import os
import sys

import typer
from typer.core import TyperGroup

from keras_qwen.cli.chat import chat
from keras_qwen.cli.convert import convert
from keras_qwen.cli.doctor import doctor
from keras_qwen.cli.finetune import finetune
from keras_qwen.cli.inspect import inspect
from keras_qwen.cli.output import plain_warnings, say_error
from keras_qwen.cli.plan import plan


class Commands(TyperGroup):
    """Says what went wrong in a line instead of a traceback; the exit status is then 1."""

    def invoke(self, context):
        try:
            with plain_warnings():
                return super().invoke(context)
        except (ValueError, OSError, ImportError) as problem:
            say_error(problem)
            raise typer.Exit(1) from problem


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    # --max_new_tokens, the Python argument's name as it is, will do, too
    context_settings={
        "token_normalize_func": lambda name: name.replace("_", "-"),
        "help_option_names": ["-h", "--help"],
    },
    add_completion=False,
    pretty_exceptions_show_locals=False,
    help="Qwen language models in Keras: fine-tune, chat, plan memory, convert and inspect checkpoints.",
)
for command in (chat, finetune, convert, inspect, plan, doctor):
    app.command()(command)


def main():
    """Runs the shell with the process's arguments; what `keras-qwen` calls."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow's banners are no answers
    sys.exit(app())
