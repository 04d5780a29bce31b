"""`python -m keras_qwen.demo`: the command line of the demo."""

import argparse
import os
import sys

import keras

from keras_qwen.demo.recipe import run


def _parse(arguments):
    parser = argparse.ArgumentParser(
        prog="python -m keras_qwen.demo",
        description="Fine-tunes a Qwen model on chats: loss and replies before and after, then saves and reloads it.",
    )
    parser.add_argument("--model", help="checkpoint folder or Hub id; by default a small model with random weights")
    parser.add_argument(
        "--data", help='.jsonl file with {"messages": [...]} on each line; by default the shipped chats'
    )
    parser.add_argument("--backend", choices=["tensorflow", "jax"], help="by default what Keras is set to")
    parser.add_argument("--output", default="demo_output", help="folder for the results (default: %(default)s)")
    return parser.parse_args(arguments)


def main(arguments=None):
    """Run the demo.

    Args:
        arguments: list of command-line arguments; by default those of the process.

    Returns:
        The process's exit status: 1 if the reloaded model differs from the trained one, 2 if the input is at fault.

    Example:
        >>> main(["--output", "demo_output"])
        0
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parse(arguments)
    if options.backend and options.backend != keras.backend.backend():
        # Keras chose its backend when the package was imported, before this line could speak: start over.
        environment = {**os.environ, "KERAS_BACKEND": options.backend}
        os.execve(sys.executable, [sys.executable, "-m", "keras_qwen.demo", *arguments], environment)
    try:
        report = run(options.model, options.data, options.output)
    except (ValueError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0 if report.reload_is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
