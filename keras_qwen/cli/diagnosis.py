"""What a checkpoint folder holds, and all that is wrong with it, from the files' headers alone.

Loading stops at the first problem; here all are collected. No Keras is needed, and no weight is read.
"""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np

from keras_qwen.checkpoint.adapter_settings import AdapterSettings
from keras_qwen.checkpoint.file_names import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_WEIGHTS_NAME,
    CONFIG_NAME,
    INDEX_NAME,
    WEIGHTS_NAME,
)
from keras_qwen.checkpoint.safetensors_files import DTYPES, STATE_DTYPES, StoredTensor, read_header, read_index
from keras_qwen.config import QwenConfig
from keras_qwen.parameters import Parameter, adapter_table, parameter_table

FETCH_AGAIN = "Fetch the file again."
_HEAD, _EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")  # buffers that old versions stored
_ADAPTER_FACTOR = re.compile(r"(.+)\.lora_(A|B)\.weight")


@dataclasses.dataclass(frozen=True)
class Problem:
    """One thing that keeps a checkpoint from loading.

    Attributes:
        kind: `"missing"`, `"unknown"`, `"misshapen"`, `"truncated"`, `"not loadable"`, `"not finite"`, `"config"` or
            `"index"`.
        subject: the tensor or file.
        text: what is wrong, and where.
        remedy: what to do.
    """

    kind: str
    subject: str
    text: str
    remedy: str


@dataclasses.dataclass
class Diagnosis:
    """What was found in a folder.

    Attributes:
        folder: the folder.
        is_adapter: whether it holds an adapter rather than a model.
        config: the model's `QwenConfig`, for an adapter the base's if that is known, or None.
        settings: the adapter's `AdapterSettings`, or None.
        tensors: {name: `StoredTensor`}, in the model's order.
        files: {weight file's name: its size in bytes}.
        problems: what is wrong, empty for a checkpoint that loads.
        notes: what is worth saying besides.
    """

    folder: Path
    is_adapter: bool
    config: QwenConfig | None = None
    settings: AdapterSettings | None = None
    tensors: dict[str, StoredTensor] = dataclasses.field(default_factory=dict)
    files: dict[str, int] = dataclasses.field(default_factory=dict)
    problems: list[Problem] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def size(self):
        """The number of elements of all tensors."""
        return sum(int(np.prod(tensor.shape, dtype="int64")) for tensor in self.tensors.values())

    @property
    def nbytes(self):
        """The bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def dtypes(self):
        """The names of the dtypes that occur, the most frequent first."""
        names = [str(tensor.dtype) for tensor in self.tensors.values()]
        return sorted(set(names), key=lambda name: (-names.count(name), name))

    def report(self, kind, subject, text, remedy):
        """Adds a problem."""
        self.problems.append(Problem(kind, subject, text, remedy))


def is_checkpoint(folder):
    """Whether a folder holds a model or an adapter, sound or not."""
    folder = Path(folder)
    return (folder / ADAPTER_CONFIG_NAME).is_file() or (
        (folder / CONFIG_NAME).is_file() and any(folder.glob("*.safetensors"))
    )


def diagnose(folder, *, base=None):
    """Compares what a checkpoint folder holds with what its config asks for.

    Args:
        folder: a model's folder, or an adapter's in PEFT's format.
        base: for an adapter, the folder of the model it is for; default: the folder that its config names, if there is
            one.

    Returns:
        A `Diagnosis`.

    Example:
        >>> diagnose("my-qwen").problems
        []
    """
    folder = Path(folder)
    found = Diagnosis(folder, (folder / ADAPTER_CONFIG_NAME).is_file() and not (folder / CONFIG_NAME).is_file())
    rows: tuple[Parameter, ...] | None
    if found.is_adapter:
        rows, broken = _read_adapter(found, base)
    else:
        rows, broken = _read_model(found)
    for name, tensor in found.tensors.items():
        if tensor.dtype not in DTYPES.values():
            known = ", ".join(map(str, DTYPES.values()))
            found.report(
                "not loadable",
                name,
                f"stored as {tensor.dtype} in {tensor.file.name}",
                f"Convert it to one of {known}.",
            )
    if rows is not None:
        _compare(found, rows, broken)
    elif found.is_adapter:
        _pair_factors(found)
    return found


def check_finite(found, advance):
    """Reads every tensor, and adds a problem for each that holds NaN or infinity.

    Args:
        found: a `Diagnosis`; a head that is stored although it is tied is compared with the embeddings, too.
        advance: called with the number of bytes read after each tensor.
    """
    for name, tensor in found.tensors.items():
        try:
            tensor.read_into(np.empty(tensor.shape, tensor.dtype), check_finite=tensor.dtype in DTYPES.values())
        except ValueError:
            found.report(
                "not finite",
                name,
                f"holds NaN or infinity in {tensor.file.name}",
                "Go back to an earlier checkpoint: the training that wrote this one had diverged.",
            )
        except OSError as problem:
            found.report("truncated", name, str(problem), FETCH_AGAIN)
        advance(tensor.nbytes)
    if found.config is not None and found.config.tie_word_embeddings and {_HEAD, _EMBEDDINGS} <= found.tensors.keys():
        if not found.tensors[_HEAD].equals(found.tensors[_EMBEDDINGS]):
            found.report(
                "unknown",
                _HEAD,
                f"differs from {_EMBEDDINGS}, but config.json ties them",
                "Set tie_word_embeddings to false in config.json.",
            )


def _read_model(found):
    """Config and headers of a model; returns the table's rows, None without a config, and what is in broken files."""
    folder, rows = found.folder, None
    try:
        found.config = QwenConfig.from_json(folder / CONFIG_NAME)
        rows = parameter_table(found.config)
    except FileNotFoundError:
        found.report(
            "missing", CONFIG_NAME, f"{folder} has no {CONFIG_NAME}", "Copy it from the model's page on the Hub."
        )
    except (ValueError, OSError) as problem:
        found.report("config", CONFIG_NAME, str(problem), "Correct the file, or use another checkpoint.")
    return rows, _read_weights(found)


def _read_weights(found):
    folder, broken = found.folder, set()
    if not (folder / INDEX_NAME).is_file():
        if (folder / WEIGHTS_NAME).is_file():
            return {None} if _read_file(found, WEIGHTS_NAME) is None else broken
        others = sorted(p.name for p in folder.glob("*") if p.suffix in (".safetensors", ".bin", ".gguf", ".pt"))
        remedy = f"Convert {', '.join(others[:4])} to safetensors." if others else "Fetch the weights."
        found.report("missing", WEIGHTS_NAME, f"neither {WEIGHTS_NAME} nor {INDEX_NAME} is there", remedy)
        return {None}
    try:
        weight_map = read_index(folder / INDEX_NAME)
    except ValueError as problem:
        found.report("index", INDEX_NAME, str(problem), FETCH_AGAIN)
        return {None}
    for file in sorted(set(weight_map.values())):
        names = {name for name, where in weight_map.items() if where == file}
        tensors = _read_file(found, file, f", and {INDEX_NAME} puts {len(names)} tensors there")
        if tensors is None:
            broken |= names
    for name, file in weight_map.items():
        tensor = found.tensors.get(name)
        if tensor is None and name not in broken:
            found.report("missing", name, f"{INDEX_NAME} says it is in {file}, but it is not there", FETCH_AGAIN)
            broken.add(name)  # said once
        elif tensor is not None and tensor.file.name != file:
            text = f"{INDEX_NAME} says it is in {file}, but it is in {tensor.file.name}"
            found.report("index", name, text, "Fetch the index again.")
    return broken


def _read_file(found, name, use=""):
    """Adds a file's tensors; None, and a problem, if it cannot be read."""
    path = found.folder / name
    if not path.is_file():
        found.report("missing", name, f"the file is not in {found.folder}{use}", "Fetch the file.")
        return None
    found.files[name] = path.stat().st_size
    try:
        tensors = read_header(path, STATE_DTYPES)
    except OSError as problem:
        text = str(problem).removesuffix(f" {FETCH_AGAIN}").removesuffix(" Fetch it again.")
        found.report("truncated", name, text, FETCH_AGAIN)
        return None
    except ValueError as problem:
        found.report("not loadable", name, str(problem), "Use a checkpoint in bfloat16, float16 or float32.")
        return None
    for twice in sorted(found.tensors.keys() & tensors.keys()):
        text = f"stands in both {found.tensors[twice].file.name} and {name}"
        found.report("index", twice, text, "Delete the file that the index does not name.")
    found.tensors.update(tensors)
    return tensors


def _compare(found, rows, broken):
    """Reports tensors that are missing, unknown or misshapen; those said to be in broken files are not missing.

    Args:
        broken: names of tensors in files that cannot be read; {None} if it is not known which those are.
    """
    names, config = {row.hf_name for row in rows}, CONFIG_NAME if not found.is_adapter else ADAPTER_CONFIG_NAME
    extra = {name for name in found.tensors.keys() - names if not _DERIVED.fullmatch(name)}
    if _HEAD in extra and not found.is_adapter:  # the config ties it
        extra.discard(_HEAD)
        found.notes.append(
            f"{_HEAD} is stored besides {_EMBEDDINGS}, to which config.json ties it: fine as long as both are equal "
            f"(--check-finite compares them)."
        )
    for row in rows if None not in broken else ():
        if row.hf_name not in found.tensors and row.hf_name not in broken:
            where = found.files and f"is in none of {_listed(found.files)}" or "is nowhere"
            found.report("missing", row.hf_name, f"{where}; {config} asks for it, {row.hf_shape}", _whole(found))
    for name in sorted(extra):
        tensor = found.tensors[name]
        text = f"{tensor.shape} in {tensor.file.name}, which {config} does not account for"
        found.report("unknown", name, text, f"Is {config} that of this checkpoint?")
    for row in rows:
        tensor = found.tensors.get(row.hf_name)
        if tensor is not None and tensor.shape != row.hf_shape:
            text = f"{tensor.shape} in {tensor.file.name}; {config} asks for {row.hf_shape}"
            found.report("misshapen", row.hf_name, text, f"Is {config} that of this checkpoint?")
    order = {row.hf_name: position for position, row in enumerate(rows)}
    found.tensors = dict(sorted(found.tensors.items(), key=lambda item: order.get(item[0], len(order))))


def _whole(found):
    return "Is the base model another one?" if found.is_adapter else "Fetch the checkpoint again, or save it again."


def _listed(names):
    names = list(names)
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more files" if len(names) > 2 else "")


def _read_adapter(found, base):
    """Settings and header of an adapter; returns the rows it should have, None if the base is not known."""
    folder = found.folder
    broken = set() if _read_file(found, ADAPTER_WEIGHTS_NAME) is not None else {None}
    try:
        found.settings = AdapterSettings.from_peft(folder / ADAPTER_CONFIG_NAME)
    except (ValueError, OSError) as problem:
        found.report("config", ADAPTER_CONFIG_NAME, str(problem), "Use an adapter without it.")
        return None, broken
    named = found.settings.other.get("base_model_name_or_path")
    base = Path(base) if base is not None else Path(named) if named and Path(named).is_dir() else None
    if base is None:
        found.notes.append(
            f"The base model {named or '(not named)'} is not on this disk, so names and shapes are only compared among "
            f"themselves: --base FOLDER compares them with the model."
        )
        return None, broken
    try:
        found.config = QwenConfig.from_json(base / CONFIG_NAME)
        table = parameter_table(found.config)
        ranks = {module: rank for module, (rank, _) in found.settings.modules(table, strict=False).items()}
        replaced = found.settings.replaced(table)
        rows = adapter_table(table, name="default", ranks=ranks, use_dora=found.settings.use_dora, replaced=replaced)
    except (ValueError, OSError) as problem:
        found.report("config", ADAPTER_CONFIG_NAME, str(problem), f"Is {base} the adapter's base model?")
        return None, broken
    return rows, broken


def _pair_factors(found):
    """Without the base: every A has its B, and both the rank."""
    factors = {}
    for name, tensor in found.tensors.items():
        if match := _ADAPTER_FACTOR.fullmatch(name):
            factors.setdefault(match[1], {})[match[2]] = tensor
    for module, pair in factors.items():
        for letter in {"A", "B"} - pair.keys():
            name = f"{module}.lora_{letter}.weight"
            found.report("missing", name, f"is not in {ADAPTER_WEIGHTS_NAME}, its partner is", FETCH_AGAIN)
        ranks = {"A": lambda t: t.shape[0], "B": lambda t: t.shape[-1]}
        seen = {letter: ranks[letter](tensor) for letter, tensor in pair.items() if len(tensor.shape) == 2}
        if len(set(seen.values())) > 1:
            text = f"lora_A has rank {seen['A']}, lora_B {seen['B']}"
            found.report("misshapen", module, text, FETCH_AGAIN)


def read_json(path):
    """A JSON object of a file beside the weights; empty if there is none or it is not valid."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
