"""What lies beside a checkpoint's weights for generation: its tokenizer and its generation_config.json."""

import json
from pathlib import Path

from keras_qwen.checkpoint.file_names import GENERATION_CONFIG_NAME
from keras_qwen.tokenizer import QwenTokenizer


def read_tokenizer(folder):
    """The `QwenTokenizer` of a checkpoint's folder, or None if there is none."""
    folder = Path(folder)
    if (folder / "tokenizer.json").is_file() or (folder / "vocab.json").is_file():
        return QwenTokenizer.from_pretrained(folder)
    return None


def read_generation_config(folder):
    """The contents of a checkpoint's generation_config.json; empty if there is none.

    Raises:
        ValueError: if the file holds no JSON object; the message names it.
    """
    path = Path(folder) / GENERATION_CONFIG_NAME
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(settings).__name__}.")
    return settings
