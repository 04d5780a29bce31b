"""How the commands speak: consoles, numbers for people, warnings and errors."""

import contextlib
import sys
import time
import warnings

from rich.console import Console
from rich.text import Text

console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)  # rich takes 80 for a file or a pipe
errors = Console(stderr=True, highlight=False)


def count(number):
    """A number of parameters or tokens for people: 494.0 M."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.1f} {unit}"
    return f"{number:.0f}"


def size(nbytes):
    """A number of bytes for people: 988.1 MB."""
    for limit, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= limit:
            return f"{nbytes / limit:.1f} {unit}"
    return f"{nbytes:.0f} bytes"


def say_error(problem):
    """Writes an error to the error stream, in one paragraph."""
    errors.print(Text.assemble(("Error: ", "bold red"), str(problem)), soft_wrap=True)


@contextlib.contextmanager
def plain_warnings():
    """A context in which warnings are one line each, without the place in the source that raised them."""

    def show(message, category, filename, lineno, file=None, line=None):
        errors.print(Text.assemble(("Note: ", "yellow"), str(message)), soft_wrap=True)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        warnings.showwarning = show
        yield


@contextlib.contextmanager
def step(text, *, spinner=True):
    """A context that says what is being done, and afterwards how long it took.

    Args:
        text: what is being done.
        spinner: whether to show that it is; not where what is done has a progress bar of its own.
    """
    start = time.monotonic()
    with errors.status(f"{text} ...") if spinner else contextlib.nullcontext():
        yield
    errors.print(Text(f"{text}: {time.monotonic() - start:.1f} s", "dim"))
