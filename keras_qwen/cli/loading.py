"""The package with its backend, and models, for the commands that need them."""

import os
import sys
from pathlib import Path

from keras_qwen.checkpoint.adapter_settings import AdapterSettings
from keras_qwen.checkpoint.file_names import ADAPTER_CONFIG_NAME, CONFIG_NAME


def load_package(backend=None):
    """`keras_qwen`, imported with Keras now that a command needs it.

    Args:
        backend: `"tensorflow"`, `"jax"` or `"torch"`; default: what Keras is set to.

    Raises:
        ImportError: if the backend is not installed; the message says how to get it.
        ValueError: if Keras runs on another backend already.
    """
    if backend is not None and "keras" not in sys.modules:
        os.environ["KERAS_BACKEND"] = backend
    import keras_qwen as kq

    running = kq.QwenCausalLM and sys.modules["keras"].backend.backend()
    if backend not in (None, running):
        raise ValueError(f"Keras runs on {running} in this process already; set KERAS_BACKEND={backend} before.")
    return kq


def adapter_base(source):
    """What an adapter's folder names as its base model; None if `source` is no adapter's folder.

    Raises:
        ValueError: if it names none.
    """
    folder = Path(source).expanduser()
    if not (folder / ADAPTER_CONFIG_NAME).is_file() or (folder / CONFIG_NAME).is_file():
        return None
    base = AdapterSettings.from_peft(folder / ADAPTER_CONFIG_NAME).other.get("base_model_name_or_path")
    if not base:
        raise ValueError(
            f"{folder} holds an adapter, and its {ADAPTER_CONFIG_NAME} does not name the base model: pass the model "
            f"and --adapter {folder}."
        )
    return base


def load_model(source, *, backend=None, adapter=None, **arguments):
    """A language model, with its adapter.

    Args:
        source: folder or Hub id of a model; or of an adapter, whose base model is then loaded, too.
        backend: as of `load_package`.
        adapter: folder or Hub id of an adapter for it.
        **arguments: of `QwenCausalLM.from_pretrained`; those that are None are left out.
    """
    base = adapter_base(source)
    if base is not None and adapter is not None:
        raise ValueError(f"{source} is an adapter itself: pass its base model, or leave out --adapter {adapter}.")
    source, adapter = (source, adapter) if base is None else (base, source)
    kq = load_package(backend)
    given = {name: value for name, value in arguments.items() if value is not None}
    model = kq.QwenCausalLM.from_pretrained(source, **given)
    if adapter is not None:
        model.load_adapter(adapter)
    return model
