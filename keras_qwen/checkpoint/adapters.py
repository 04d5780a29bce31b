"""Adapter files in PEFT's format: from variables to a folder, and back."""

import json

import numpy as np

from keras_qwen import keras_private
from keras_qwen.backend import filled
from keras_qwen.checkpoint.file_names import ADAPTER_CONFIG_NAME, ADAPTER_WEIGHTS_NAME
from keras_qwen.checkpoint.replacing import replaced_folder
from keras_qwen.checkpoint.safetensors_files import read_header, write_file
from keras_qwen.checkpoint.saving import stored_form
from keras_qwen.ops.processes import written_by_first
from keras_qwen.parameters import is_adapter_path, match_variables


def save_adapter(folder, *, settings, table, variables, same=None):
    """Writes adapter_config.json and adapter_model.safetensors; other files in the folder stay.

    Args:
        folder: where to; created if missing. Written beside it first, and renamed at the end.
        settings: contents of adapter_config.json.
        table: rows of `keras_qwen.parameters.adapter_table`.
        variables: the model's, those of the adapter among them.
        same: {hf_name: hf_name of the table}: tensors to write a second time under another name.

    Raises:
        OSError: if writing fails; nothing in `folder` has changed then.
    """
    matched = _matched(table, variables)
    rows = {row.hf_name: row for row in table}
    rows |= {copy: rows[name] for copy, name in (same or {}).items()}
    names = (ADAPTER_CONFIG_NAME, ADAPTER_WEIGHTS_NAME)
    rows = sorted(rows.items())

    def write(values):
        with replaced_folder(folder, stale=names.__contains__) as new:
            text = json.dumps(settings, indent=2, sort_keys=True) + "\n"
            (new / ADAPTER_CONFIG_NAME).write_text(text, encoding="utf-8")
            write_file(
                new / ADAPTER_WEIGHTS_NAME,
                [(name, np.dtype("float32"), row.hf_shape, stored_form(row, values)) for name, row in rows],
            )

    written_by_first([matched[row.path] for _, row in rows], write)


def _matched(table, variables):
    return match_variables(table, [v for v in variables if is_adapter_path(v.path)])


class AdapterTensors:
    """The tensors of an adapter folder, checked against the adapter's table.

    Args:
        folder: the adapter folder.
        table: rows of `keras_qwen.parameters.adapter_table`.
        same: {hf_name: hf_name of the table}: tensors that the file may hold a second time under another name.

    Raises:
        OSError: if the file is missing or damaged.
        ValueError: naming tensors that are missing, unknown or of the wrong shape.
    """

    def __init__(self, folder, table, *, same=None):
        file = folder / ADAPTER_WEIGHTS_NAME
        if not file.is_file():
            found = ", ".join(sorted(p.name for p in folder.glob("adapter_model*"))[:3])
            hint = f" It has {found}; convert it with peft's save_pretrained." if found else ""
            raise OSError(f"{folder} has no {ADAPTER_WEIGHTS_NAME}.{hint}")
        stored, names = read_header(file), {row.hf_name for row in table}
        for copy, name in (same or {}).items():
            if copy in stored and name in stored and stored[copy].equals(stored[name]):
                stored.pop(copy)
        if missing := sorted(names - stored.keys()):
            raise ValueError(
                f"{file} lacks {len(missing)} of the {len(names)} tensors that {ADAPTER_CONFIG_NAME} asks for on this "
                f"model: {', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}. Is it for another base model?"
            )
        if unknown := sorted(stored.keys() - names):
            raise ValueError(
                f"{file} has {len(unknown)} tensors that {ADAPTER_CONFIG_NAME} does not account for on this model: "
                f"{', '.join(unknown[:3])}{', ...' if len(unknown) > 3 else ''}. Is it for another base model?"
            )
        for row in table:
            if (shape := stored[row.hf_name].shape) != row.hf_shape:
                raise ValueError(
                    f"Tensor {row.hf_name} in {file} has shape {shape}; this model and {ADAPTER_CONFIG_NAME} ask for "
                    f"{row.hf_shape}. The adapter was trained on a model of another size."
                )
        self.table, self.tensors = table, stored

    def read_into(self, variables):
        """Gives the adapter's variables their values."""
        matched = _matched(self.table, variables)
        for row in self.table:
            variable, tensor = matched[row.path], self.tensors[row.hf_name]
            read = lambda parts, row=row, tensor=tensor: tensor.read_parts(row.stored(parts))  # noqa: E731
            variable.assign(filled(row.shape, "float32", read, keras_private.sharding_of(variable)))
