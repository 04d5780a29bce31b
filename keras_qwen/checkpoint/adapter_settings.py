"""AdapterSettings: which modules an adapter changes and how, as Python arguments and as PEFT's adapter_config.json."""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

from keras_qwen.checkpoint.file_names import ADAPTER_CONFIG_NAME
from keras_qwen.parameters import projections, replaceable

ALL_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

_OURS = {  # PEFT's key: ours
    "r": "rank",
    "lora_alpha": "alpha",
    "target_modules": "targets",
    "lora_dropout": "dropout",
    "use_dora": "use_dora",
    "use_rslora": "use_rslora",
    "rank_pattern": "rank_pattern",
    "alpha_pattern": "alpha_pattern",
    "modules_to_save": "modules_to_save",
    "ensure_weight_tying": "ties_head",
}
# Keys of PEFT 0.21 with the values under which they change nothing; any other value is refused.
_NEUTRAL = {
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "bias": ("none",),
    "corda_config": (None,),
    "eva_config": (None,),
    "fan_in_fan_out": (False,),
    "kasa_config": (None,),
    "layer_replication": (None, []),
    "loftq_config": (None, {}),
    "lora_bias": (False,),
    "lora_ga_config": (None,),
    "megatron_config": (None,),
    "monteclora_config": (None,),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "use_bdlora": (None, False),
    "use_qalora": (False,),
    "velora_config": (None,),
    # Others, "pissa" and "olora" among them, change the frozen weights when PEFT makes the adapter.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}
_USED = ("exclude_modules", "layers_to_transform", "layers_pattern")
_NO_MATTER = (  # notes about the file, or read only together with a key that is refused
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "revision",
    "task_type",
)
_DEFAULTS = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
}


@dataclasses.dataclass(frozen=True)
class AdapterSettings:
    """The settings of one adapter; the arguments are those of `QwenCausalLM.enable_lora`.

    Args:
        ties_head: whether a head that is tied to the embeddings takes their copy in `modules_to_save`, too.
        other: further keys of an adapter_config.json, written back as they came.

    Raises:
        ValueError: for a value out of its range.
    """

    rank: int
    alpha: float | None = None
    targets: tuple[str, ...] | str = ALL_PROJECTIONS
    dropout: float = 0.0
    use_dora: bool = False
    use_rslora: bool = False
    rank_pattern: dict[str, int] = dataclasses.field(default_factory=dict)
    alpha_pattern: dict[str, float] = dataclasses.field(default_factory=dict)
    modules_to_save: tuple[str, ...] = ()
    ties_head: bool = True
    other: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        settle = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731
        settle("alpha", self.rank if self.alpha is None else self.alpha)
        settle("targets", self.targets if isinstance(self.targets, str) else tuple(self.targets))
        for name in ("rank_pattern", "alpha_pattern", "other"):
            settle(name, dict(getattr(self, name) or {}))
        modules = self.modules_to_save or ()
        settle("modules_to_save", (modules,) if isinstance(modules, str) else tuple(modules))
        for name, rank in {"rank": self.rank, **self.rank_pattern}.items():
            if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
                raise ValueError(f"The rank of an adapter must be a positive integer, not {rank!r} ({name}).")
        for name, alpha in {"alpha": self.alpha, **self.alpha_pattern}.items():
            if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
                raise ValueError(f"alpha must be a number, not {alpha!r} ({name}).")
        if not isinstance(self.dropout, int | float) or not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, not {self.dropout!r}.")
        for pattern in (*self.rank_pattern, *self.alpha_pattern, *([self.targets] if self._is_pattern else [])):
            try:
                re.compile(pattern)
            except re.error as problem:
                raise ValueError(f"{pattern!r} is no regular expression: {problem}.") from problem

    @property
    def _is_pattern(self):
        return isinstance(self.targets, str)

    def modules(self, table, *, strict=True) -> dict[str, tuple[int, float]]:
        """Which projections of a model the adapter changes: {Hugging Face's module name: (rank, scale)}.

        Args:
            table: rows of `keras_qwen.parameters.parameter_table`.
            strict: whether a target or a pattern that matches nothing is an error, even if others match.

        Raises:
            ValueError: naming the target or pattern, and the modules there are.
        """
        known = [module for module in projections(table) if not self._is_replaced(module)]
        leaves = list(dict.fromkeys(module.rpartition(".")[2] for module in known))
        self._check_targets(table, known, leaves, strict)
        chosen = [module for module in known if self._is_target(module) and self._is_chosen(module)]
        if not chosen:
            raise ValueError(
                f"The adapter's targets {self.targets!r} match no projection; there are {_listed(leaves)}."
            )
        for name, patterns in {"rank_pattern": self.rank_pattern, "alpha_pattern": self.alpha_pattern}.items():
            for pattern in patterns if strict else ():
                if not any(_matches(pattern, module) for module in chosen):
                    raise ValueError(f"{name} {pattern!r} matches none of the adapted modules, e.g. {chosen[0]}.")
        found = {}
        for module in chosen:
            rank = _first(self.rank_pattern, module, self.rank)
            alpha = _first(self.alpha_pattern, module, self.alpha)
            found[module] = rank, alpha / (math.sqrt(rank) if self.use_rslora else rank)
        return found

    def _check_targets(self, table, known, leaves, strict):
        targets = (self.targets,) if self._is_pattern else self.targets
        for module in replaceable(table):
            if any(module == t or module.endswith(f".{t}") for t in targets):
                raise ValueError(
                    f"LoRA adapts projections, not {module}: train a copy of it with modules_to_save, or leave it out."
                )
        if self._is_pattern or not strict:
            return
        for target in targets:
            if not any(module == target or module.endswith(f".{target}") for module in known):
                raise ValueError(
                    f"The target {target!r} matches no projection; there are {_listed(leaves)}. A single text instead "
                    f"of a list is read as a regular expression for whole names such as {known[0]}."
                )

    def _is_target(self, module):
        if self.targets == "all-linear":
            return True
        if self._is_pattern:
            return re.fullmatch(self.targets, module) is not None
        return any(module == target or module.endswith(f".{target}") for target in self.targets)

    def _is_chosen(self, module):
        """What the rarer keys of a file leave of the targets."""
        excluded = self.other.get("exclude_modules") or ()
        if isinstance(excluded, str):
            if re.fullmatch(excluded, module):
                return False
        elif any(module == name or module.endswith(f".{name}") for name in excluded):
            return False
        layers = self.other.get("layers_to_transform")
        if layers is None or layers == [] or self._is_pattern:
            return True
        patterns = self.other.get("layers_pattern") or r"[^.]*"
        patterns = [patterns] if isinstance(patterns, str) else patterns
        index = next((m for m in (re.match(rf"(?:^|.*?\.){p}\.(\d+)\.", module) for p in patterns) if m), None)
        return index is not None and int(index[1]) in ([layers] if isinstance(layers, int) else layers)

    def _is_replaced(self, module):
        return any(module == name or module.endswith(f".{name}") for name in self.modules_to_save)

    def replaced(self, table) -> tuple[str, ...]:
        """The modules of which a copy is trained, by Hugging Face's names.

        Raises:
            ValueError: for one that is not there, or of which no copy can be trained.
        """
        known = replaceable(table)
        chosen = []
        for name in self.modules_to_save:
            module = next((m for m in known if m == name or m.endswith(f".{name}")), None)
            if module is None and name == "lm_head" and self.ties_head and "embed_tokens" in self.modules_to_save:
                continue  # one copy for both
            if module is None:
                tied = " (this model's head is tied to embed_tokens: name that)" if name == "lm_head" else ""
                raise ValueError(
                    f"modules_to_save names {name!r}{tied}; copies can be trained of {_listed(known)}. Others are "
                    f"trained without an adapter, by train_only."
                )
            chosen.append(module)
        return tuple(dict.fromkeys(chosen))

    def to_dict(self) -> dict[str, Any]:
        """The arguments that make these settings again, for JSON."""
        return dataclasses.asdict(self)

    def to_peft(self) -> dict[str, Any]:
        """The contents of adapter_config.json."""
        ours = {key: getattr(self, name) for key, name in _OURS.items()}
        ours["target_modules"] = self.targets if self._is_pattern else sorted(self.targets)
        ours["modules_to_save"] = list(self.modules_to_save) or None
        if not self.modules_to_save:
            ours["ensure_weight_tying"] = self.other.get("ensure_weight_tying", False)
        return {**_DEFAULTS, **self.other, **ours}

    @classmethod
    def from_peft(cls, file: str | Path):
        """Reads an adapter_config.json.

        Raises:
            OSError: if the file is missing or no JSON.
            ValueError: naming a key that changes the computation and is not supported.
        """
        file = Path(file)
        if not file.is_file():
            raise OSError(f"{file.parent} has no {ADAPTER_CONFIG_NAME}: it holds no adapter in PEFT's format.")
        try:
            stored = json.loads(file.read_text(encoding="utf-8"))
            kind = stored.get("peft_type")
        except (ValueError, AttributeError) as problem:
            raise OSError(f"{file} is no adapter_config.json: {problem!r}.") from problem
        if kind != "LORA":
            raise ValueError(f"{file} says peft_type={kind!r}; keras_qwen reads LORA adapters (rsLoRA and DoRA too).")
        for key, value in stored.items():
            known = key in _OURS or key in _USED or key in _NO_MATTER
            neutral = _NEUTRAL.get(key, (None, False, [], {}, ""))
            if not known and not any(value == n and isinstance(value, bool) == isinstance(n, bool) for n in neutral):
                raise ValueError(
                    f"{file} sets {key}={value!r}, which changes the computation and is not supported; "
                    f"supported is {key}={neutral[0]!r}."
                )
        for key in ("r", "target_modules"):
            if stored.get(key) is None:
                raise ValueError(f"{file} has no {key}.")
        arguments = {name: stored[key] for key, name in _OURS.items() if stored.get(key) is not None}
        arguments.setdefault("alpha", 8)  # PEFT's default
        arguments.setdefault("ties_head", False)
        other = {k: v for k, v in stored.items() if k not in _OURS or k == "ensure_weight_tying"}
        try:
            return cls(**arguments, other=other)
        except ValueError as problem:
            raise ValueError(f"{file}: {problem}") from problem


def _matches(pattern, module):
    """As in PEFT, a pattern is for the end of a module's name, from a dot on."""
    return re.match(rf"(.*\.)?({pattern})$", module) is not None


def _first(patterns, module, default):
    return next((value for pattern, value in patterns.items() if _matches(pattern, module)), default)


def _listed(names):
    return ", ".join(names)
