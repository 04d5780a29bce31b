"""Lets the shell start without Keras: there, the package's names are imported when the first of them is used.

Elsewhere `import keras_qwen` imports them at once, because `keras.saving.load_model` finds only classes that are.
"""

import importlib
import sys
from pathlib import Path

_loading = False


def is_shell():
    """Whether this process was started as `keras-qwen` or `python -m keras_qwen.cli`."""
    arguments = list(getattr(sys, "orig_argv", []))
    as_module = ("-m", "keras_qwen.cli") in zip(arguments, arguments[1:], strict=False)
    return as_module or Path((getattr(sys, "argv", None) or [""])[0]).stem == "keras-qwen"


def is_wanted():
    """Whether the package is being imported by the shell, and no name of it has been used yet."""
    return is_shell() and not _loading


def importer(package):
    """The package's `__getattr__` until its names are imported.

    Args:
        package: its name; `__all__` must be set before a name is looked up.
    """

    def look_up(name):
        global _loading
        module = sys.modules[package]
        if _loading or name not in module.__all__:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        _loading = True
        try:
            importlib.reload(module)
        except BaseException:
            _loading = False
            raise
        return getattr(module, name)

    return look_up
