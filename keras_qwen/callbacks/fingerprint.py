"""What a training run depends on, in few numbers, so that a resumed one can say what is different."""

import hashlib
import json
import zlib

import keras
import numpy as np

from keras_qwen.backend import host_value
from keras_qwen.callbacks.data_order import are_arrays

_FEW = 16  # numbers of each frozen weight that are looked at


def fingerprint(model, arguments) -> dict:
    """Config, dtype, optimizer, tokenizer, frozen weights and data of a run: {name: number or text}.

    Args:
        model: compiled.
        arguments: of `fit`, as the user gave them.
    """
    found = {"dtype": model.dtype_policy.name, **_flat("optimizer", keras.optimizers.serialize(model.optimizer))}
    if hasattr(model, "config"):
        found |= _flat("config", model.config.to_hf())
        found.pop("config.dtype", None)  # what the file was stored in
    if getattr(model, "tokenizer", None) is not None:
        found["tokenizer"] = _tokenizer(model.tokenizer)
    found["frozen weights"] = _frozen(model.non_trainable_weights)
    found |= _flat("data", _data(arguments))
    return json.loads(json.dumps(found, default=str))  # as it will be read back


def differences(before, now) -> list[str]:
    """One line for each entry that is not the same."""
    names = [*before, *(name for name in now if name not in before)]
    return [
        f"{name}: {before.get(name, 'nothing')} then, {now.get(name, 'nothing')} now"
        for name in names
        if before.get(name) != now.get(name)
    ]


def _flat(prefix, content):
    if isinstance(content, dict) and content:
        return {
            name: value
            for key, inner in content.items()
            if key != "name"  # Keras numbers them: adamw_1 is the second of a notebook
            for name, value in _flat(f"{prefix}.{key}", inner).items()
        }
    return {prefix: content}


def _tokenizer(tokenizer):
    digest = hashlib.sha256()
    for name, content in sorted(tokenizer.files().items()):
        digest.update(name.encode() + b"\0" + content + b"\0")
    return digest.hexdigest()[:16]


def _frozen(variables):
    """A checksum of the first numbers of each weight: another base model has others."""
    checksum = 0
    for variable in variables:
        value = variable.value
        while len(value.shape) > 1:
            value = value[0]
        value = host_value(value[:_FEW] if len(value.shape) else value)
        checksum = zlib.crc32(np.ascontiguousarray(value).tobytes(), checksum)
    return f"{len(variables)} weights, {checksum:08x}"


def _data(arguments):
    x = arguments["x"]
    settings = {name: arguments[name] for name in ("batch_size", "steps_per_epoch", "validation_split")}
    shuffle = {"shuffle": arguments["shuffle"]}
    if are_arrays(x, arguments["y"], arguments["sample_weight"]):
        return {**settings, **shuffle, "arrays": _arrays((x, arguments["y"], arguments["sample_weight"]))}
    kind = {**settings, "kind": type(x).__name__}
    if hasattr(x, "fingerprint"):
        return {**kind, "content": x.fingerprint()}
    if isinstance(x, keras.utils.PyDataset):
        return {**kind, **shuffle, "batches": x.num_batches, "first batch": _arrays(x[0])}
    if hasattr(x, "element_spec"):
        return {**kind, "elements": str(x.element_spec)}
    return kind


def _arrays(structure):
    leaves = [np.asarray(leaf) for leaf in keras.tree.flatten(structure) if leaf is not None]
    checksum = 0
    for leaf in leaves:
        checksum = zlib.crc32(np.ascontiguousarray(leaf).tobytes(), checksum)
    return f"{', '.join(f'{leaf.dtype}{list(leaf.shape)}' for leaf in leaves)}, {checksum:08x}"
