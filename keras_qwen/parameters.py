"""The parameter table: one row for each variable of a model, read by loader, exporter, layouts and planner.

Nothing else in the package knows a weight's name in a Hugging Face checkpoint, its shape, or how a variable's
dimensions relate to it.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from keras_qwen.config import QwenConfig

if TYPE_CHECKING:  # the table itself needs no Keras: `keras-qwen inspect` reads it without
    from keras_qwen.ops.quantization import Quantized


@dataclasses.dataclass(frozen=True)
class Transform:
    """A named, invertible map from a checkpoint's tensor to a variable's value.

    Attributes:
        name: shown in tables.
        forward: array as stored in the checkpoint -> array as the variable holds it.
        inverse: the way back; `inverse(forward(x))` is x.
        stored_index: index (a tuple of slices) of a part of the variable -> index of that part in the checkpoint.
    """

    name: str
    forward: Callable[[np.ndarray], np.ndarray]
    inverse: Callable[[np.ndarray], np.ndarray]
    stored_index: Callable[[tuple[slice, ...]], tuple[slice, ...]]


IDENTITY = Transform("identity", lambda x: x, lambda x: x, lambda index: index)
TRANSPOSE = Transform("transpose", lambda x: x.T, lambda x: x.T, lambda index: index[::-1])
"""Checkpoints store a projection as (out, in), as `torch.nn.Linear` does; Keras kernels are (in, out)."""


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One row of the table.

    Attributes:
        hf_name: the tensor's name in a Hugging Face checkpoint.
        path: the variable's path below the model, e.g. `"layers_0/self_attn/q_proj/kernel"`.
        shape: the variable's shape.
        transform: checkpoint tensor -> variable.
        axes: what each of the variable's dimensions counts: `"vocab"`, `"embed"`, `"heads"`, `"kv_heads"`,
            `"head_dim"`, `"mlp"`. (Projections merge heads and head_dim in one dimension, named by its heads.)
        quantized: of a part of a quantised matrix, what is known of that; then the transform is the matrix's.
    """

    hf_name: str
    path: str
    shape: tuple[int, ...]
    transform: Transform
    axes: tuple[str, ...]
    quantized: "Quantized | None" = None

    @property
    def hf_module(self) -> str:
        """The name of the module whose tensor this is, as PEFT's patterns see it."""
        return self.hf_name.rpartition(".")[0]

    @property
    def layer_path(self) -> str:
        """The path of the layer that has the variable."""
        return self.path.rpartition("/")[0]

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """The shape of the checkpoint's tensor."""
        shape = self.shape if self.quantized is None else (self.quantized.inputs, self.quantized.outputs)
        return shape[::-1] if self.transform is TRANSPOSE else shape

    def stored(self, parts):
        """Parts of the variable's value, `(index, array)`, as parts of the checkpoint's tensor; arrays are views."""
        return [(self.transform.stored_index(index), self.transform.inverse(array)) for index, array in parts]

    @property
    def part(self) -> str:
        """Of a part of a quantised matrix, its name."""
        return self.path.rpartition("/kernel_")[2]

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


def parameter_table(config: QwenConfig, *, head: bool = True) -> tuple[Parameter, ...]:
    """The table of a model: every variable once, in the order of the layers.

    Args:
        config: the model's config.
        head: whether to include `lm_head` (a `QwenBackbone` has none; a tied model has none of its own either).

    Example:
        >>> table = parameter_table(config)
        >>> table[0].hf_name, table[0].path, table[0].axes
        ('model.embed_tokens.weight', 'embed_tokens/embeddings', ('vocab', 'embed'))
    """
    hidden, head_dim = config.hidden_size, config.head_dim
    sizes = {
        "embed": hidden,
        "heads": config.num_attention_heads * head_dim,
        "kv_heads": config.num_key_value_heads * head_dim,
        "mlp": config.intermediate_size,
        "vocab": config.vocab_size,
        "head_dim": head_dim,
    }

    def row(hf_name, path, axes, transform=IDENTITY):
        return Parameter(hf_name, path, tuple(sizes[a] for a in axes), transform, axes)

    def projection(hf_module, path, axes, bias):
        yield row(f"{hf_module}.weight", f"{path}/kernel", axes, TRANSPOSE)
        if bias:
            yield row(f"{hf_module}.bias", f"{path}/bias", axes[1:])

    rows = [row("model.embed_tokens.weight", "embed_tokens/embeddings", ("vocab", "embed"))]
    for i in range(config.num_hidden_layers):
        hf, path = f"model.layers.{i}", f"layers_{i}"
        rows.append(row(f"{hf}.input_layernorm.weight", f"{path}/input_layernorm/scale", ("embed",)))
        for name, axes, bias in (
            ("q_proj", ("embed", "heads"), config.attention_bias),
            ("k_proj", ("embed", "kv_heads"), config.attention_bias),
            ("v_proj", ("embed", "kv_heads"), config.attention_bias),
            ("o_proj", ("heads", "embed"), config.output_bias),
        ):
            rows += projection(f"{hf}.self_attn.{name}", f"{path}/self_attn/{name}", axes, bias)
        if config.qk_norm:
            for name in ("q_norm", "k_norm"):
                rows.append(row(f"{hf}.self_attn.{name}.weight", f"{path}/self_attn/{name}/scale", ("head_dim",)))
        rows.append(row(f"{hf}.post_attention_layernorm.weight", f"{path}/post_attention_layernorm/scale", ("embed",)))
        for name, axes in (
            ("gate_proj", ("embed", "mlp")),
            ("up_proj", ("embed", "mlp")),
            ("down_proj", ("mlp", "embed")),
        ):
            rows += projection(f"{hf}.mlp.{name}", f"{path}/mlp/{name}", axes, bias=False)
    rows.append(row("model.norm.weight", "norm/scale", ("embed",)))
    if head and not config.tie_word_embeddings:
        rows += projection("lm_head", "lm_head", ("embed", "vocab"), bias=False)
    return tuple(rows)


def quantized_table(table, kind) -> tuple[Parameter, ...]:
    """The rows of a model whose projections are quantised: each kernel's row is replaced by those of its parts.

    Args:
        table: rows of `parameter_table`.
        kind: name of the kind of quantisation; None for the table as it is.

    Example:
        >>> [row.path for row in quantized_table(table, "int8") if row.quantized][:2]
        ['layers_0/self_attn/q_proj/kernel_codes', 'layers_0/self_attn/q_proj/kernel_scale']
    """
    if kind is None:
        return table
    from keras_qwen.ops.quantization import Quantized

    kernels, rows = set(projections(table).values()), []
    for row in table:
        if row not in kernels:
            rows.append(row)
            continue
        quantized = Quantized(kind, *row.shape)
        for name, part in quantized.parts.items():
            axes = row.axes[-len(part.shape) :]
            rows.append(Parameter(row.hf_name, f"{row.path}_{name}", part.shape, row.transform, axes, quantized))
    return tuple(rows)


_PEFT_PREFIX = "base_model.model."


def adapter_layer_name(name: str) -> str:
    """What the layer with an adapter's variables is called, inside of the layer that it adapts."""
    return f"lora_{name}"


def is_adapter_path(path: str) -> bool:
    """Whether a variable's path is that of an adapter's."""
    return any(part.startswith("lora_") for part in path.split("/"))


def projections(table) -> dict[str, Parameter]:
    """{Hugging Face's module name: the kernel's row} of all that LoRA can adapt."""
    return {r.hf_module: r for r in table if r.hf_name.endswith("_proj.weight") and r.transform is TRANSPOSE}


def replaceable(table) -> dict[str, Parameter]:
    """{Hugging Face's module name: its row} of what PEFT's `modules_to_save` can name: embeddings and head."""
    return {row.hf_module: row for row in table if "vocab" in row.axes}


def adapter_table(table, *, name, ranks, use_dora=False, replaced=()) -> tuple[Parameter, ...]:
    """The rows of an adapter's variables, with the names PEFT gives their tensors in a file.

    Args:
        table: rows of `parameter_table`.
        name: the adapter's name; in the variables' paths, not in the tensors' names.
        ranks: {Hugging Face's module name: rank}.
        use_dora: whether there are magnitudes.
        replaced: names of modules that have a trained copy of their whole weight.

    Example:
        >>> row = adapter_table(table, name="default", ranks={"model.layers.0.self_attn.q_proj": 8})[0]
        >>> row.path, row.hf_name
        ('layers_0/self_attn/q_proj/lora_default/A', 'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight')
    """
    rows, known, kept = [], projections(table), replaceable(table)
    for module, rank in ranks.items():
        (n, m), (into, out) = known[module].shape, known[module].axes
        hf, path = _PEFT_PREFIX + module, f"{known[module].layer_path}/{adapter_layer_name(name)}"
        rows.append(Parameter(f"{hf}.lora_A.weight", f"{path}/A", (n, rank), TRANSPOSE, (into, "rank")))
        rows.append(Parameter(f"{hf}.lora_B.weight", f"{path}/B", (rank, m), TRANSPOSE, ("rank", out)))
        if use_dora:
            rows.append(Parameter(f"{hf}.lora_magnitude_vector", f"{path}/magnitude", (m,), IDENTITY, (out,)))
    for module in replaced:
        row = kept[module]
        path = f"{row.layer_path}/{adapter_layer_name(name)}/{row.path.rpartition('/')[2]}"
        rows.append(dataclasses.replace(row, hf_name=_PEFT_PREFIX + row.hf_name, path=path))
    return tuple(rows)


def match_variables(table, variables) -> dict[str, object]:
    """Pairs each row with its variable: {row.path: variable}, strictly one to one.

    Args:
        table: rows of `parameter_table`, or of `adapter_table`.
        variables: Keras variables; their paths may have the model's name before the row's path. Those of adapters
            which the table is not about, and the state of random numbers, are passed over.

    Raises:
        ValueError: naming variables without a row, rows without a variable, and shapes that differ.
    """
    rows = {row.path: row for row in table}
    found: dict[str, object] = {}
    for variable in variables:
        parts = variable.path.split("/")
        path = next((p for p in ("/".join(parts[i:]) for i in range(len(parts))) if p in rows), None)
        if path is None and (is_adapter_path(variable.path) or parts[-1] == "seed_generator_state"):
            continue
        if path is None:
            raise ValueError(f"Variable {variable.path} has no row in the parameter table of this config.")
        if path in found:
            raise ValueError(f"Variables {found[path].path} and {variable.path} both match the row {path}.")
        if tuple(variable.shape) != rows[path].shape:
            raise ValueError(
                f"Variable {variable.path} has shape {tuple(variable.shape)}, the table {rows[path].shape}."
            )
        found[path] = variable
    if missing := rows.keys() - found.keys():
        raise ValueError(f"The model has no variable for {sorted(missing)[:5]} ({len(missing)} rows of the table).")
    return found
