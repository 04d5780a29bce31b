"""`keras-qwen doctor`: whether this machine is ready, and what is missing."""

import importlib
import os
import platform
import sys

import typer
from rich.table import Table
from rich.text import Text

from keras_qwen._backend_check import BACKENDS, chosen_backend, installed, require_backend
from keras_qwen.cli import machine
from keras_qwen.cli.output import console, size

_PACKAGES = "keras-qwen keras numpy tokenizers huggingface-hub jinja2 matplotlib grain".split()
_OPTIONAL = {
    "pyarrow": "reads .parquet data",
    "datasets": "trains on Hugging Face datasets",
    "keras-hub": "its samplers in generate",
    "tensorboard": "shows training as it goes",
}
_CUDA = {
    "tensorflow": 'pip install "keras-qwen[tensorflow-cuda]"',
    "jax": 'pip install "keras-qwen[jax-cuda]"',
    "torch": "pip install torch (a build for CUDA: https://pytorch.org/get-started)",
}


def doctor():
    """Show backend, devices, memory and versions; say what is missing and how to get it.

    Works without a backend, too. The exit status is 1 if no model could be run as things are.
    """
    ills, hints = [], []
    backend, chosen_by = chosen_backend()
    cards = machine.nvidia_cards()
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()

    def row(name, value, good=None):
        table.add_row(name, Text(value, {True: "green", False: "red", None: ""}[good]))

    row("machine", f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores, Python {_python()}")
    row("memory", _memory())
    for number, card in enumerate(cards):
        row("" if number else "NVIDIA", card)
    for name in BACKENDS:
        note = f"  <- Keras runs on it ({chosen_by})" if name == backend else ""
        known = _version(name)
        row(name, (known or "not installed") + note, bool(known) if name == backend else None)
    try:
        require_backend()
        found = _devices(backend) if backend in BACKENDS else []
    except (ImportError, OSError, RuntimeError) as problem:
        ills.append(str(problem))
        found = []
    for number, (name, kind, memory) in enumerate(found):
        row("" if number else "devices", f"{name}  {kind}" * (name != kind) + f"{_limit(memory)}")
    if cards and found and all(name.startswith("cpu") for name, _, _ in found):
        hints.append(f"{backend} does not see the NVIDIA card: {_CUDA[backend]}")
    for name in _PACKAGES:
        row(name, machine.version(name) or "not installed", None if machine.version(name) else False)
    for name, use in _OPTIONAL.items():
        row(name, machine.version(name) or f"not installed ({use}: pip install {name})")
    row("Hub cache", _cache())
    console.print(table)
    for ill in ills:
        console.print(Text.assemble(("missing", "bold red"), f": {ill}"), soft_wrap=True)
    for hint in hints:
        console.print(Text.assemble(("hint", "bold yellow"), f": {hint}"), soft_wrap=True)
    if ills:
        raise typer.Exit(1)
    console.print(Text.assemble(("ready", "bold green"), f": models run on {backend}"))


def _devices(backend):
    """`(name, kind, bytes of memory or None)` of each device of the backend, which is imported for it."""
    return importlib.import_module(f"keras_qwen.cli.devices_{backend}").devices()


def _version(backend):
    """A backend may come as another distribution (tensorflow-cpu), whose version only the module tells."""
    return machine.version(backend) or ("installed" if installed(backend) else None)


def _python():
    return f"{platform.python_version()} ({sys.executable})"


def _memory():
    total, available = machine.total_memory(), machine.available_memory()
    if total is None:
        return "not known on this system"
    return size(total) + (f", {size(min(available, total))} available" if available is not None else "")


def _limit(nbytes):
    return "" if nbytes is None else f", {size(nbytes)} for the program"


def _cache():
    from huggingface_hub import constants

    offline = ", HF_HUB_OFFLINE is set: nothing is fetched" if constants.HF_HUB_OFFLINE else ""
    return f"{constants.HF_HUB_CACHE}, {size(machine.free_disk(constants.HF_HUB_CACHE))} free{offline}"
