"""The parameter table: one row for each variable of a model, read by loader, exporter, layouts and planner.

Nothing else in the package knows a weight's name in a Hugging Face checkpoint, its shape, or how a variable's
dimensions relate to it.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from keras_qwen.config import QwenConfig


@dataclasses.dataclass(frozen=True)
class Transform:
    """A named, invertible map from a checkpoint's tensor to a variable's value.

    Attributes:
        name: shown in tables.
        forward: array as stored in the checkpoint -> array as the variable holds it.
        inverse: the way back; `inverse(forward(x))` is x.
    """

    name: str
    forward: Callable[[np.ndarray], np.ndarray]
    inverse: Callable[[np.ndarray], np.ndarray]


IDENTITY = Transform("identity", lambda x: x, lambda x: x)
TRANSPOSE = Transform("transpose", lambda x: x.T, lambda x: x.T)
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
    """

    hf_name: str
    path: str
    shape: tuple[int, ...]
    transform: Transform
    axes: tuple[str, ...]

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """The shape of the checkpoint's tensor."""
        return self.shape[::-1] if self.transform is TRANSPOSE else self.shape

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


def match_variables(table, variables) -> dict[str, object]:
    """Pairs each row with its variable: {row.path: variable}, strictly one to one.

    Args:
        table: rows of `parameter_table`.
        variables: Keras variables; their paths may have the model's name before the row's path.

    Raises:
        ValueError: naming variables without a row, rows without a variable, and shapes that differ.
    """
    rows = {row.path: row for row in table}
    found: dict[str, object] = {}
    for variable in variables:
        parts = variable.path.split("/")
        path = next((p for p in ("/".join(parts[i:]) for i in range(len(parts))) if p in rows), None)
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
