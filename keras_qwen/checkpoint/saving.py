"""From variables to a checkpoint folder in Hugging Face's form, all or nothing."""

import dataclasses
import json
import re
import warnings
from pathlib import Path

import keras
import numpy as np

from keras_qwen.checkpoint.file_names import (
    COMPANION_FILES,
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    INDEX_NAME,
    WEIGHTS_NAME,
)
from keras_qwen.checkpoint.replacing import replaced_folder
from keras_qwen.checkpoint.safetensors_files import DTYPES, write_file
from keras_qwen.hardware import UNITS
from keras_qwen.ops.processes import written_by_first
from keras_qwen.parameters import match_variables

_BY_NAME = {str(dtype): dtype for dtype in DTYPES.values()}


@dataclasses.dataclass(frozen=True)
class Source:
    """What a loaded model remembers of its checkpoint: the folder, and each tensor's dtype by name."""

    folder: Path
    dtypes: dict[str, np.dtype]


def save(
    folder,
    *,
    config,
    table,
    variables,
    source=None,
    max_shard_size="5GB",
    dtype=None,
    tokenizer=None,
    generation_config=None,
):
    """Writes config, weights and companion files; see `QwenModel.save_pretrained`."""
    limit = parse_size(max_shard_size)
    if dtype is not None and str(dtype) not in _BY_NAME:
        raise ValueError(f"dtype={dtype!r} cannot be saved; known are {', '.join(_BY_NAME)}.")
    matched = match_variables(table, variables)
    if source is not None and not source.folder.is_dir():
        warnings.warn(
            f"{source.folder}, from where the model was loaded, is gone: tokenizer and generation settings are not "
            f"carried over. Pass tokenizer= to save one.",
            stacklevel=3,
        )

    def stored_dtype(row):
        if dtype is not None:
            return _BY_NAME[str(dtype)]
        if source is not None:
            return source.dtypes[row.hf_name]
        return np.dtype(_BY_NAME[keras.backend.standardize_dtype(matched[row.path].dtype)])

    dtypes = {row.hf_name: stored_dtype(row) for row in table}
    written = set(dtypes.values())
    name = str(written.pop()) if len(written) == 1 else config.dtype
    config = dataclasses.replace(config, dtype=name)

    def write(values):
        with replaced_folder(folder, stale=_stale) as new:
            text = json.dumps(config.to_hf(), indent=2, sort_keys=True) + "\n"
            (new / CONFIG_NAME).write_text(text, encoding="utf-8")
            _write_weights(new, table, values, dtypes, limit)
            _write_companions(new, source, tokenizer, generation_config)

    written_by_first([matched[row.path] for row in table], write)


def parse_size(size) -> int:
    """`"5GB"` or `"200 MiB"` as a number of bytes; integers are taken as they are.

    Raises:
        ValueError: for anything else, and for sizes that are not positive.
    """
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?b)\s*", size, re.IGNORECASE)
        unit = match and UNITS.get(match[2].upper())
        if not unit:
            raise ValueError(f"size {size!r} is not understood; write '5GB', '500MB' or a number of bytes.")
        size = int(float(match[1]) * unit)
    if not isinstance(size, int) or isinstance(size, bool) or size <= 0:
        raise ValueError(f"size must be positive, not {size!r}.")
    return size


def _stale(name):
    """Files of an older checkpoint that the new one replaces or makes wrong."""
    return name in (CONFIG_NAME, INDEX_NAME, *COMPANION_FILES) or name.endswith(".safetensors")


def _write_weights(folder, table, values, dtypes, limit):
    shards, sizes = [[]], [0]
    for row in table:
        nbytes = row.size * dtypes[row.hf_name].itemsize
        if shards[-1] and sizes[-1] + nbytes > limit:
            shards.append([]), sizes.append(0)
        shards[-1].append(row)
        sizes[-1] += nbytes
    weight_map = {}
    for i, rows in enumerate(shards, 1):
        file = WEIGHTS_NAME if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        write_file(
            folder / file,
            [(row.hf_name, dtypes[row.hf_name], row.hf_shape, stored_form(row, values)) for row in rows],
        )
        weight_map |= {row.hf_name: file for row in rows}
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def stored_form(row, values):
    """A function that takes the next of the values, which is that of a row of the table, and returns it as stored."""
    return lambda: row.transform.inverse(next(values))


def _write_companions(folder, source, tokenizer, generation_config):
    """Tokenizer files, chat template and generation settings: byte for byte as they came, unless replaced."""
    copied = [] if source is None else [source.folder / name for name in COMPANION_FILES]
    for path in copied:
        if path.is_file():
            (folder / path.name).write_bytes(path.read_bytes())
    if generation_config is not None:
        text = json.dumps(generation_config, indent=2, sort_keys=True) + "\n"
        (folder / GENERATION_CONFIG_NAME).write_text(text, encoding="utf-8")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
