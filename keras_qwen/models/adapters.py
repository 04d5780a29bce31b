"""AdapterMethods: LoRA and its relatives on a language model."""

import contextlib
import re

from keras_qwen.checkpoint import hub
from keras_qwen.checkpoint.adapter_settings import ALL_PROJECTIONS, AdapterSettings
from keras_qwen.checkpoint.adapters import AdapterTensors, save_adapter
from keras_qwen.checkpoint.file_names import ADAPTER_CONFIG_NAME
from keras_qwen.layers.lora import dropout_seeds, make_lora, make_replacement
from keras_qwen.parameters import adapter_table, is_adapter_path, projections, replaceable


class AdapterMethods:
    """Mixin of `QwenCausalLM`: several named adapters on one frozen base, at most one of them active."""

    _adapters = None  # {name: AdapterSettings}
    _merged = None  # {layer path: what `restore_kernel` needs, or None if that was not kept}
    _active_adapter = None

    @property
    def adapters(self):
        """Names of the adapters the model has."""
        return list(self._adapters or ())

    @property
    def active_adapter(self):
        """Name of the adapter that the model computes with, merged or not; None without one."""
        return self._active_adapter

    @property
    def adapter_is_merged(self):
        """Whether the active adapter is part of the weights now, by `merge_adapter`."""
        return self._merged is not None

    def enable_lora(
        self,
        rank,
        *,
        alpha=None,
        targets=ALL_PROJECTIONS,
        dropout=0.0,
        use_dora=False,
        use_rslora=False,
        rank_pattern=None,
        alpha_pattern=None,
        modules_to_save=None,
        name="default",
    ):
        """Adds an adapter and makes it active. Only it is trained from now on: everything else is frozen.

        The base is frozen whole, biases, norms and embeddings included, and never gets a gradient. The adapter's
        variables are float32 under every dtype policy. May be called before or after `compile`; after steps of training
        the optimizer has to be made anew, and `fit` says so.

        Args:
            rank: size of the change of each projection.
            alpha: strength; the change is multiplied by alpha / rank. Default: rank.
            targets: names of the projections; or one text, a regular expression for whole names like
                `model.layers.0.self_attn.q_proj`.
            dropout: rate at which the adapter's inputs are dropped while training.
            use_dora: whether to train a magnitude for each column of a kernel, too.
            use_rslora: whether to multiply by alpha / sqrt(rank) instead.
            rank_pattern, alpha_pattern: {pattern: value} for modules that differ; a regular expression for the end of a
                name, like `layers.0.self_attn.q_proj`.
            modules_to_save: `"embed_tokens"` or `"lm_head"` or both: a copy of them is trained whole, as part of the
                adapter. A tied head takes the embeddings' copy.
            name: the adapter's name.

        Raises:
            ValueError: for an unknown target, a pattern that matches nothing, a name that is taken, or a bad value.

        Example:
            >>> model.enable_lora(16, alpha=32, targets=["q_proj", "v_proj"])
            >>> model.compile(keras.optimizers.AdamW(2e-4))

        References: Hu et al., 2021, arXiv:2106.09685 (LoRA); Kalajdzievski, 2023, arXiv:2312.03732 (rsLoRA); Liu et
        al., 2024, arXiv:2402.09353 (DoRA).
        """
        settings = AdapterSettings(
            rank, alpha, targets, dropout, use_dora, use_rslora, rank_pattern, alpha_pattern, modules_to_save
        )
        self._check_new_adapter(name)
        self._add_adapter(name, settings)

    def load_adapter(
        self, source, name="default", *, revision=None, token=None, cache_dir=None, local_files_only=False
    ):
        """Adds an adapter in PEFT's format and makes it active; it can be trained further.

        Args:
            source: a folder with adapter_config.json and adapter_model.safetensors, or a Hub repository id.
            name: the adapter's name in this model.
            revision, token, cache_dir, local_files_only: passed to `huggingface_hub` for a Hub id.

        Raises:
            OSError: if files are missing or damaged.
            ValueError: for a setting that is not supported, and for tensors that do not fit this model; the message
                names it. The model has not changed then.

        Example:
            >>> model.load_adapter("me/my-adapter", name="mine")
        """
        self._check_new_adapter(name)
        folder = hub.resolve(
            source, "adapter", revision=revision, token=token, cache_dir=cache_dir, local_files_only=local_files_only
        )
        settings = AdapterSettings.from_peft(folder / ADAPTER_CONFIG_NAME)
        table = self._adapter_table(name, settings, strict=False)
        tensors = AdapterTensors(folder, table, same=_under_the_heads_name(table))
        self._add_adapter(name, settings, strict=False)
        tensors.read_into(self.variables)

    def save_adapter(self, folder, name=None):
        """Writes an adapter in PEFT's format: adapter_config.json and adapter_model.safetensors.

        Args:
            folder: where to; created if missing.
            name: which adapter; default: the active one.

        Raises:
            OSError: if writing fails; nothing in `folder` has changed then.
            ValueError: if there is no such adapter.
        """
        name, settings = self._adapter(name)
        stored = settings.to_peft()
        if stored.get("base_model_name_or_path") is None:
            stored["base_model_name_or_path"] = self.name_or_path
        table = self._adapter_table(name, settings, strict=False)
        same = _under_the_heads_name(table) if self.lm_head is None and settings.ties_head else {}
        save_adapter(folder, settings=stored, table=table, variables=self.variables, same=same)

    def push_adapter_to_hub(
        self, repo_id, name=None, *, token=None, private=None, commit_message="Upload adapter", revision=None
    ):
        """Saves an adapter to a temporary folder and uploads it to the Hugging Face Hub.

        Args:
            repo_id: `"user/name"`; created if missing.
            name: which adapter; default: the active one.
            token, private, commit_message, revision: passed to `huggingface_hub`.

        Returns:
            The address of the commit.
        """
        name, _ = self._adapter(name)
        return hub.push(
            lambda folder: self.save_adapter(folder, name),
            repo_id,
            token=token,
            private=private,
            commit_message=commit_message,
            revision=revision,
        )

    def set_adapter(self, name):
        """Makes another adapter the active one, the only one that is computed with and trained.

        Args:
            name: of an adapter; None to compute with the base alone. Then nothing is trained.

        Raises:
            ValueError: if there is no such adapter, or the active one is merged.
        """
        if name is not None:
            self._adapter(name)
        self._check_not_merged()
        self._active_adapter = name
        for layer in self.adapted_layers():
            layer.active_adapter = name if name in layer.adapters else None
            for other, adapter in layer.adapters.items():
                adapter.trainable = other == name

    @contextlib.contextmanager
    def disable_adapter(self):
        """A context in which the model computes with the base alone, also inside of a traced step.

        Raises:
            ValueError: if the active adapter is merged.

        Example:
            >>> with model.disable_adapter():
            ...     reference = model.score(inputs)
        """
        self._check_not_merged()
        layers = [(layer, layer.active_adapter) for layer in self.adapted_layers()]
        for layer, _ in layers:
            layer.active_adapter = None
        try:
            yield
        finally:
            for layer, name in layers:
                layer.active_adapter = name

    def merge_adapter(self, *, keep_base=True):
        """Adds the active adapter to the weights: the model computes the same, as fast as without an adapter.

        `save_pretrained` then writes the merged weights, which need no adapter.

        Args:
            keep_base: whether to keep the weights from before, as much memory again as the adapted ones take, so that
                `unmerge_adapter` can put them back bit for bit.

        Raises:
            ValueError: without an active adapter, or if it is merged already.
        """
        name, settings = self._adapter(None)
        self._check_not_merged()
        if self.lm_head is None and settings.modules_to_save and not settings.ties_head:
            raise ValueError(
                "The adapter has embeddings of its own that the head does not share, but this model's config ties them "
                "(ensure_weight_tying is false in the adapter): there is no merged checkpoint of such a model."
            )
        merged = {}
        for path, layer in self._adaptable().items():
            if name in layer.adapters:
                before = layer.replace_kernel(layer.adapters[name].merged(layer.full_kernel()))
                merged[path] = before if keep_base else None
                layer.active_adapter = None
                layer.adapters[name].trainable = False
        self._merged = merged

    def unmerge_adapter(self):
        """Takes back `merge_adapter`: the base is bit for bit what it was, and the adapter is trained again.

        Raises:
            ValueError: if nothing is merged, or the base was not kept.
        """
        if self._merged is None:
            raise ValueError("No adapter is merged.")
        layers = self._adaptable()
        if any(before is None for before in self._merged.values()):
            raise ValueError("The base was not kept when the adapter was merged; load the model and the adapter again.")
        for path, before in self._merged.items():
            layers[path].restore_kernel(before)
        self._merged = None
        self.set_adapter(self._active_adapter)

    def delete_adapter(self, name):
        """Removes an adapter. If it was the active one, none is then; a merged one stays in the weights.

        Raises:
            ValueError: if there is no such adapter.
        """
        self._adapter(name)
        if name == self._active_adapter:
            self._merged = self._active_adapter = None
        for layer in self.adapted_layers():
            if name in layer.adapters:
                layer.active_adapter = None if layer.active_adapter == name else layer.active_adapter
                layer.remove_adapter(name)
        self._adapters = {other: settings for other, settings in self._adapters.items() if other != name} or None

    def adapted_layers(self):
        """The layers that have an adapter."""
        return [layer for layer in self._adaptable().values() if layer.adapters] if self._adapters else []

    def get_config(self):
        if not self._adapters:
            return super().get_config()
        state = {
            "settings": {name: settings.to_dict() for name, settings in self._adapters.items()},
            "active": self._active_adapter,
            "merged": self.adapter_is_merged,
        }
        return {**super().get_config(), "adapters": state}

    @classmethod
    def from_config(cls, config, custom_objects=None):
        config = dict(config)
        state, frozen = config.pop("adapters", None), config.pop("frozen", None)
        model = super().from_config(config)
        if state is not None:
            for name, settings in state["settings"].items():
                model._add_adapter(name, AdapterSettings(**settings), strict=False)
            model.set_adapter(state["active"])
            if state["merged"]:
                model.merge_adapter(keep_base=False)
        if frozen is not None:
            model.restore_frozen_paths(frozen)
        return model

    def call(self, inputs, training=None, mask=None):
        with self.dropout_seeds(training):
            return super().call(inputs, training=training)

    def dropout_seeds(self, training):
        """A context for calls of the model's layers, in which the adapters' dropout may be recomputed."""
        return dropout_seeds(self.adapted_layers(), training)

    def computation(self):
        return [*super().computation(), *(layer.adapter for layer in self.adapted_layers())]

    def trained_variables(self):
        """The trainable variables, counting a merged adapter's, whose optimizer state is kept."""
        name = self._active_adapter if self.adapter_is_merged else None
        merged = [layer.adapters[name] for layer in self.adapted_layers() if name in layer.adapters]
        for adapter in merged:
            adapter.trainable = True
        variables = self.trainable_variables
        for adapter in merged:
            adapter.trainable = False
        return variables

    def why_nothing_is_trained(self):
        if self.adapter_is_merged:
            return f"The adapter {self._active_adapter!r} is merged: call unmerge_adapter to train it."
        if self._adapters:
            return f"No adapter is active: set_adapter chooses one of {', '.join(self.adapters)}."
        return super().why_nothing_is_trained()

    def check_saveable(self):
        self.check_not_quantized("save_pretrained")
        if self._active_adapter is not None and self._merged is None:
            raise ValueError(
                f"The adapter {self._active_adapter!r} is active, and save_pretrained would leave it out: call "
                f"merge_adapter first, or write it by itself with save_adapter. (set_adapter(None) turns it off.)"
            )

    def _adaptable(self):
        """{layer path: layer} of all that adapters can change."""
        table = self.parameter_table(self.config)
        rows = [*projections(table).values(), *replaceable(table).values()]
        first = {layer.name: layer for layer in self.layers}
        found = {}
        for row in rows:
            head, *rest = row.layer_path.split("/")
            layer = first[head]
            for part in rest:
                layer = getattr(layer, part)
            found[row.layer_path] = layer
        return found

    def _adapter_table(self, name, settings, strict):
        table = self.parameter_table(self.config)
        ranks = {module: rank for module, (rank, _) in settings.modules(table, strict=strict).items()}
        return adapter_table(
            table, name=name, ranks=ranks, use_dora=settings.use_dora, replaced=settings.replaced(table)
        )

    def _check_new_adapter(self, name):
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            raise ValueError(f"An adapter's name consists of letters, digits, - and _; {name!r} does not.")
        if name in (self._adapters or {}):
            raise ValueError(
                f"There is an adapter {name!r} already: choose another name=, or delete_adapter({name!r})."
            )
        self._check_not_merged()

    def _add_adapter(self, name, settings, strict=True):
        table = self.parameter_table(self.config)
        layers, modules, kept = self._adaptable(), projections(table), replaceable(table)
        chosen, replaced = settings.modules(table, strict=strict), settings.replaced(table)
        for variable in self.variables:
            if not is_adapter_path(variable.path):
                variable.trainable = False
        for module, (rank, scale) in chosen.items():
            adapter = make_lora(name, rank, scale, settings.dropout, settings.use_dora)
            layers[modules[module].layer_path].add_adapter(name, adapter)
        for module in replaced:
            layers[kept[module].layer_path].add_adapter(name, make_replacement(name, settings.ties_head))
        self._adapters = {**(self._adapters or {}), name: settings}
        self.set_adapter(name)

    def _adapter(self, name):
        name = self._active_adapter if name is None else name
        if name is None:
            raise ValueError("No adapter is active: enable_lora or load_adapter makes one, set_adapter chooses one.")
        if name not in (self._adapters or {}):
            raise ValueError(f"There is no adapter {name!r}; there are {', '.join(self.adapters) or 'none'}.")
        return name, self._adapters[name]

    def _check_not_merged(self):
        if self._merged is not None:
            raise ValueError(f"The adapter {self._active_adapter!r} is merged; call unmerge_adapter first.")


def _under_the_heads_name(table):
    """{name: name in the table}: how PEFT stores a copy of tied embeddings a second time."""
    names = [row.hf_name for row in table]
    return {name.replace("model.embed_tokens", "lm_head"): name for name in names if "embed_tokens" in name}
