"""QwenConfig: a checkpoint's `config.json` as a frozen dataclass, under Hugging Face's names."""

import dataclasses
import json
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SHAPE_KEYS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"

# Per model type: biases on q, k and v; RMSNorm on q and k heads; the default head_dim.
_MODEL_TYPES = {
    "qwen2": dict(qkv_bias=True, qk_norm=False, head_dim=None),
    "qwen3": dict(qkv_bias=False, qk_norm=True, head_dim=128),
}
_MOE_TYPES = ("qwen2_moe", "qwen3_moe")
# rope_type -> (keys it needs, keys it may have), beside rope_type and rope_theta.
_ROPE_TYPES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ("original_max_position_embeddings",)),
    "yarn": (
        ("factor",),
        (
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
    ),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
}
# Settings of related models that change the computation. Any value but these means a model we do not implement.
_ONLY_WITHOUT_EFFECT = {
    "quantization_config": (None, {}),
    "use_mrope": (None, False),
    "partial_rotary_factor": (None, 1, 1.0),
    "attn_output_gate": (None, False),
    "logits_scaling": (None, 1, 1.0),
    "final_logit_softcapping": (None,),
    "attn_logit_softcapping": (None,),
    "mlp_bias": (None, False),
    "no_bias": (None, False),
    "is_encoder_decoder": (None, False),
    "vision_config": (None,),
    "dual_chunk_attention_config": (None,),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class QwenConfig:
    """Shape and settings of a Qwen2, Qwen2.5, QwQ, DeepSeek-R1-Distill-Qwen or dense Qwen3 model.

    Field names are those of Hugging Face's `config.json`; what is left out takes transformers' default for the
    model type. The rotary embedding may be given in the old form (`rope_theta`, `rope_scaling`) or the new
    (`rope_parameters`); all three are filled in. Keys this package does not know are kept in `extra` and written
    back by `to_hf`.

    Args:
        model_type: `"qwen2"` (q/k/v biases) or `"qwen3"` (RMSNorm on q and k heads).
        head_dim: size of one head; default `hidden_size // num_attention_heads` for qwen2, 128 for qwen3.
        attention_bias: qwen3 only, a bias on q, k, v and o projections.
        rope_parameters: `{"rope_type": ..., "rope_theta": ..., ...}`; types default, linear, dynamic, yarn, llama3.
        layer_types: one of `"full_attention"`, `"sliding_attention"` for each layer; default from
            `use_sliding_window`, `sliding_window` and `max_window_layers`.
        dtype: the dtype name the checkpoint's tensors are stored in, or None.
        extra: further keys of config.json, kept for the round trip.

    Raises:
        ValueError: for a setting that is missing, inconsistent, or changes the computation and is not implemented.

    Example:
        >>> config = QwenConfig(model_type="qwen2", hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
        ...                     num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True)
        >>> config.head_dim
        64
    """

    model_type: str = "qwen2"
    vocab_size: int = 151936
    hidden_size: int = 4096
    intermediate_size: int = 22016
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 32
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool | None = None
    attention_dropout: float = 0.0
    rope_theta: float | None = None
    rope_scaling: Mapping[str, Any] | None = None
    rope_parameters: Mapping[str, Any] | None = None
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: tuple[str, ...] | None = None
    dtype: str | None = None
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        fill = lambda **values: [object.__setattr__(self, name, value) for name, value in values.items()]  # noqa: E731
        kind = self._check_model_type()
        if self.num_key_value_heads is None:
            fill(num_key_value_heads=self.num_attention_heads)
        self._check_numbers()
        if self.head_dim is None:
            head_dim = kind["head_dim"]
            if head_dim is None:
                if self.hidden_size % self.num_attention_heads:
                    raise ValueError(
                        f"hidden_size {self.hidden_size} is no multiple of num_attention_heads "
                        f"{self.num_attention_heads}; set head_dim."
                    )
                head_dim = self.hidden_size // self.num_attention_heads
            fill(head_dim=head_dim)
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; the rotary embedding turns pairs, so it must be even.")
        if self.model_type == "qwen2" and self.attention_bias not in (None, True):
            raise ValueError("attention_bias=false is not a qwen2 setting: its q, k and v projections always have one.")
        fill(attention_bias=kind["qkv_bias"] if self.attention_bias is None else bool(self.attention_bias))
        rope = normalise_rope(self.rope_theta, self.rope_scaling, self.rope_parameters)
        scaling = {k: v for k, v in rope.items() if k != "rope_theta"}
        fill(
            rope_parameters=rope,
            rope_theta=rope["rope_theta"],
            rope_scaling=None if rope["rope_type"] == "default" else scaling,
        )
        if self.use_sliding_window and (self.sliding_window is None or self.sliding_window < 1):
            raise ValueError(f"use_sliding_window is set, but sliding_window is {self.sliding_window}.")
        fill(layer_types=self._layer_types(), extra=dict(self.extra))
        for key, harmless in _ONLY_WITHOUT_EFFECT.items():
            if key in self.extra and self.extra[key] not in harmless:
                raise ValueError(
                    f"config.json sets {key}={self.extra[key]!r}, which changes the computation and is not "
                    f"implemented. Use a checkpoint without it."
                )

    def _check_model_type(self):
        if self.model_type in _MOE_TYPES:
            raise ValueError(
                f"model_type {self.model_type!r} is a mixture of experts, which keras_qwen does not support yet; "
                f"supported are {sorted(_MODEL_TYPES)}."
            )
        if self.model_type not in _MODEL_TYPES:
            raise ValueError(f"model_type {self.model_type!r} is not supported; supported are {sorted(_MODEL_TYPES)}.")
        if self.hidden_act not in ("silu", "swish"):
            raise ValueError(f"hidden_act {self.hidden_act!r} is not implemented; Qwen models use 'silu'.")
        return _MODEL_TYPES[self.model_type]

    def _check_numbers(self):
        for name in (*SHAPE_KEYS, "num_key_value_heads", "max_position_embeddings"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive integer, not {value!r}.")
        if self.head_dim is not None and (not isinstance(self.head_dim, int) or self.head_dim < 1):
            raise ValueError(f"head_dim must be a positive integer, not {self.head_dim!r}.")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is no multiple of num_key_value_heads "
                f"{self.num_key_value_heads}."
            )
        if not self.rms_norm_eps > 0:
            raise ValueError(f"rms_norm_eps must be positive, not {self.rms_norm_eps!r}.")
        if not 0 <= self.attention_dropout < 1:
            raise ValueError(f"attention_dropout must lie in [0, 1), not {self.attention_dropout!r}.")

    def _layer_types(self):
        n = self.num_hidden_layers
        if self.layer_types is None:
            first_sliding = self.max_window_layers if self.use_sliding_window else n
            return tuple(FULL_ATTENTION if i < first_sliding else SLIDING_ATTENTION for i in range(n))
        types = tuple(self.layer_types)
        if len(types) != n:
            raise ValueError(f"layer_types names {len(types)} layers, num_hidden_layers is {n}.")
        if unknown := set(types) - {FULL_ATTENTION, SLIDING_ATTENTION}:
            raise ValueError(f"layer_types has {sorted(unknown)}; known are {FULL_ATTENTION!r}, {SLIDING_ATTENTION!r}.")
        if SLIDING_ATTENTION in types and not self.use_sliding_window:
            raise ValueError("layer_types asks for sliding_attention, but use_sliding_window is not set.")
        return types

    @property
    def qk_norm(self) -> bool:
        """Whether query and key heads are normalised before the rotary embedding (Qwen3)."""
        return _MODEL_TYPES[self.model_type]["qk_norm"]

    @property
    def output_bias(self) -> bool:
        """Whether `o_proj` has a bias (Qwen3 with `attention_bias`)."""
        return self.attention_bias and self.model_type != "qwen2"

    def window(self, layer_index: int) -> int | None:
        """The sliding window of one layer in tokens, or None for full attention."""
        return self.sliding_window if self.layer_types[layer_index] == SLIDING_ATTENTION else None

    @classmethod
    def from_hf(cls, settings: Mapping[str, Any], *, require_shapes: bool = False) -> "QwenConfig":
        """Builds a config from the contents of a `config.json`, in the old form or the new.

        Args:
            settings: the parsed JSON object.
            require_shapes: whether a missing shape key (`hidden_size`, ...) is an error rather than a default.

        Raises:
            ValueError: as the class, and for missing shape keys.
        """
        settings = dict(settings)
        if "model_type" not in settings:
            raise ValueError("config.json has no model_type.")
        missing = [k for k in SHAPE_KEYS if k not in settings]
        if require_shapes and missing and settings["model_type"] in _MODEL_TYPES:
            raise ValueError(f"config.json lacks {', '.join(missing)}.")
        if settings.get("dtype") is None:
            settings["dtype"] = settings.get("torch_dtype")
        if isinstance(settings.get("dtype"), str):
            settings["dtype"] = settings["dtype"].removeprefix("torch.")
        fields = {f.name for f in dataclasses.fields(cls)} - {"extra"}
        known = {k: settings[k] for k in fields & settings.keys()}
        # As in transformers, null leaves a setting at its default, but for the two where null has a meaning.
        known = {k: v for k, v in known.items() if v is not None or k in ("sliding_window", "num_key_value_heads")}
        extra = {k: v for k, v in settings.items() if k not in fields | {"torch_dtype"}}
        return cls(**known, extra=extra)

    @classmethod
    def from_json(cls, path: str | Path, **overrides) -> "QwenConfig":
        """Reads a `config.json` file; `overrides` replace settings (`rope_scaling={...}`).

        Raises:
            OSError: if the file cannot be read.
            ValueError: if it is not a JSON object, or as the class; the message names the file.
        """
        path = Path(path)
        try:
            settings = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as problem:
            raise ValueError(f"{path} is not valid JSON: {problem}.") from problem
        if not isinstance(settings, dict):
            raise ValueError(f"{path} holds a JSON {type(settings).__name__}, not an object.")
        try:
            return cls.from_hf(_override(settings, overrides), require_shapes=True)
        except ValueError as problem:
            raise ValueError(f"{path}: {problem}") from problem

    @classmethod
    def from_pretrained(cls, source: str | Path, *, revision=None, token=None, cache_dir=None, local_files_only=False):
        """Reads the config of a checkpoint folder or Hub repository.

        Args:
            source: a folder, or a Hub id such as `"Qwen/Qwen2.5-0.5B-Instruct"`.
            revision, token, cache_dir, local_files_only: passed to `huggingface_hub` for a Hub id.

        Example:
            >>> QwenConfig.from_pretrained("Qwen/Qwen2.5-0.5B-Instruct").num_hidden_layers  # doctest: +SKIP
            24
        """
        from keras_qwen.checkpoint import hub  # needs the network only here, so config.py stays at the bottom

        folder = hub.resolve(
            source, "config", revision=revision, token=token, cache_dir=cache_dir, local_files_only=local_files_only
        )
        return cls.from_json(folder / "config.json")

    def replace(self, **changes) -> "QwenConfig":
        """A copy with some settings changed; settings derived from them are derived anew."""
        return type(self).from_hf(_override(self.to_hf(), changes))

    def to_hf(self) -> dict[str, Any]:
        """The contents of `config.json`: what was read, and what was derived, in the old form and the new.

        Both forms are written so that older and newer versions of transformers, vLLM and llama.cpp read it alike.
        """
        out = {"architectures": [{"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[self.model_type]]}
        out |= dict(self.extra)
        for field in dataclasses.fields(self):
            if field.name != "extra":
                value = getattr(self, field.name)
                out[field.name] = dict(value) if isinstance(value, Mapping) else value
        out["layer_types"] = list(self.layer_types)
        out["torch_dtype"] = self.dtype
        if self.model_type == "qwen2":
            del out["attention_bias"]  # not a key of this model type
        if self.dtype is None:
            del out["dtype"], out["torch_dtype"]
        return out


def _override(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with changes; what was derived from a changed setting is dropped, so that it is derived again."""
    settings = dict(settings)
    if changes.keys() & {"rope_theta", "rope_scaling"} and "rope_parameters" not in changes:
        read = settings.pop("rope_parameters", None) or {}
        settings.setdefault("rope_theta", read.get("rope_theta"))
        if "rope_scaling" not in changes and settings.get("rope_scaling") is None:
            kept = {k: v for k, v in read.items() if k != "rope_theta"}
            settings["rope_scaling"] = None if kept.get("rope_type", "default") == "default" else kept
    if "rope_parameters" in changes:
        settings.pop("rope_theta", None), settings.pop("rope_scaling", None)
    windows = {"num_hidden_layers", "use_sliding_window", "sliding_window", "max_window_layers"}
    if changes.keys() & windows and "layer_types" not in changes:
        settings.pop("layer_types", None)
    if changes.keys() & {"hidden_size", "num_attention_heads"} and settings.get("model_type") == "qwen2":
        settings.pop("head_dim", None)
    if "dtype" in changes:
        settings.pop("torch_dtype", None)
    return settings | dict(changes)


def normalise_rope(theta, scaling, parameters) -> dict[str, Any]:
    """Old form or new to the new: a dict with rope_type, rope_theta (float) and the type's own settings."""
    if parameters:
        if any(isinstance(v, Mapping) for v in parameters.values()):
            raise ValueError("rope_parameters that differ by layer type are not implemented.")
        rope = dict(parameters)
        if theta is not None and float(rope.setdefault("rope_theta", theta)) != float(theta):
            raise ValueError(f"rope_theta is {theta}, rope_parameters says {rope['rope_theta']}.")
    else:
        rope = dict(scaling or {})
        rope["rope_theta"] = 10000.0 if theta is None else theta
    old, new = rope.pop("type", None), rope.pop("rope_type", None)
    if old is not None and new is not None and old != new:
        raise ValueError(f"rope_scaling has type {old!r} and rope_type {new!r}.")
    kind = new or old or "default"
    if kind not in _ROPE_TYPES:
        raise ValueError(f"rope_type {kind!r} is not implemented; known are {sorted(_ROPE_TYPES)}.")
    needed, allowed = _ROPE_TYPES[kind]
    rope = {k: v for k, v in rope.items() if v is not None}
    rope.setdefault("rope_theta", 10000.0)
    if rope.get("partial_rotary_factor", 1.0) == 1.0:
        rope.pop("partial_rotary_factor", None)
    if lacking := [k for k in needed if k not in rope]:
        raise ValueError(f"rope_type {kind!r} needs {', '.join(lacking)}.")
    for key in rope.keys() - {"rope_theta", *needed, *allowed}:
        if kind == "default" or key == "partial_rotary_factor":
            raise ValueError(f"rope setting {key}={rope[key]!r} is not implemented for rope_type {kind!r}.")
        warnings.warn(f"rope_type {kind!r} does not use {key}; ignored, as transformers does.", stacklevel=4)
    for key, value in rope.items():
        if key not in ("truncate",) and not (isinstance(value, (int, float)) and math.isfinite(value)):
            raise ValueError(f"rope setting {key} must be a number, not {value!r}.")
    if not rope["rope_theta"] > 0 or not rope.get("factor", 1.0) > 0:
        raise ValueError("rope_theta and factor must be positive.")
    return {"rope_type": kind, **rope, "rope_theta": float(rope["rope_theta"])}
