"""Says what to install or set when the backend that Keras is about to import is missing; imports no backend itself."""

import importlib.util
import json
import os
from pathlib import Path

BACKENDS = ("tensorflow", "jax", "torch")


def require_backend():
    """Check, before Keras is imported, that the backend it is going to import is installed.

    Raises:
        ImportError: the backend is missing; the message names the setting and the extra that mend it.

    Example:
        >>> require_backend()
        >>> import keras
    """
    chosen, source = chosen_backend()
    if chosen not in BACKENDS or installed(chosen):
        return  # what Keras does not know, it says better itself
    others = [name for name in BACKENDS if installed(name)]
    install = 'pip install "keras-qwen[tensorflow]"' if chosen != "jax" else 'pip install "keras-qwen[jax]"'
    if chosen == "torch":
        install = "pip install torch"
    if others:
        raise ImportError(
            f"Keras is to run on {chosen} ({source}), which is not installed, while {' and '.join(others)} "
            f"{'is' if len(others) == 1 else 'are'}. Set the environment variable KERAS_BACKEND={others[0]} "
            f"before Python starts, or install {chosen}: {install}"
        )
    raise ImportError(
        "keras_qwen needs a backend for Keras, and none is installed. Install one: "
        'pip install "keras-qwen[tensorflow]" or pip install "keras-qwen[jax]" '
        '(for NVIDIA cards: "keras-qwen[tensorflow-cuda]" or "keras-qwen[jax-cuda]"). '
        "With JAX, also set the environment variable KERAS_BACKEND=jax."
    )


def chosen_backend():
    """The backend Keras will import, and where that choice comes from, by Keras's own order of precedence."""
    if backend := os.environ.get("KERAS_BACKEND"):
        return backend, "chosen by KERAS_BACKEND"
    path = _keras_folder() / "keras.json"
    try:
        settings = json.loads(path.read_text())
    except (OSError, ValueError):  # Keras, too, goes on with its defaults
        settings = {}
    if isinstance(settings, dict) and "backend" in settings:
        return settings["backend"], f"chosen by {path}"
    return "tensorflow", "its default"


def _keras_folder():
    if folder := os.environ.get("KERAS_HOME"):
        return Path(folder).expanduser()
    home = Path.home()
    return (home if os.access(home, os.W_OK) else Path("/tmp")) / ".keras"


def installed(name):
    return importlib.util.find_spec(name) is not None
