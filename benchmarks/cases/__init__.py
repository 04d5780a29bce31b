"""One case a file: what varies, who takes part, and what one of them does at one point."""

import importlib
import pkgutil


def names():
    """The names of all cases."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load(name):
    """The module of a case."""
    return importlib.import_module(f"{__name__}.{name}")
