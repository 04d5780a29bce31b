"""QwenModel: what backbone and language model share."""

import collections
import warnings

import keras
import numpy as np

from keras_qwen.backend import concrete_value
from keras_qwen.checkpoint import hub, loading, saving
from keras_qwen.config import QwenConfig
from keras_qwen.keras_private import SeveralProcesses, deferred_initialization
from keras_qwen.models.freezing import FreezingMethods
from keras_qwen.models.mesh_functions import MeshFunctions
from keras_qwen.models.quantizing import QuantizationMethods, quantized_policy
from keras_qwen.ops import processes
from keras_qwen.ops.attention import choose_implementation
from keras_qwen.ops.attention_backend import backend_module
from keras_qwen.ops.placement import check_model, whole
from keras_qwen.parameters import is_adapter_path, parameter_table, quantized_table
from keras_qwen.training.fitting import all_arguments, prepared_fit, training_settings
from keras_qwen.training.mesh_batches import MeshBatches, on_mesh

INPUT_NAMES = ("token_ids", "padding_mask", "segment_ids", "position_ids")


class QwenModel(QuantizationMethods, FreezingMethods, MeshFunctions, SeveralProcesses, keras.Model):
    """A functional Keras model with optional inputs, a changeable `remat`, and Hugging Face checkpoints.

    Subclasses set `config`, `attention` and `blocks`; `has_head` says whether there is a language-model head.
    """

    has_head = True
    source = None  # of a loaded model: what `save_pretrained` has to write as it was
    name_or_path = None  # of a loaded model: what it was loaded by

    input_spec = property(lambda self: None, lambda self, value: None)  # Keras's would demand the optional inputs

    def call(self, inputs, training=None, mask=None):
        return self.called(super().call, self.complete_inputs(inputs), training)

    def complete_inputs(self, inputs):
        """Checks the inputs and returns all four in a dict, None for those not given; takes bare token ids, too."""
        if not isinstance(inputs, dict):
            inputs = {"token_ids": inputs}
        if unknown := inputs.keys() - set(INPUT_NAMES):
            raise ValueError(f"Unknown inputs {sorted(unknown)}; known are {', '.join(INPUT_NAMES)}.")
        if inputs.get("token_ids") is None:
            raise ValueError("The inputs have no 'token_ids'.")
        inputs = {
            name: value if value is None or hasattr(value, "shape") else keras.ops.convert_to_tensor(value, "int32")
            for name, value in ((name, inputs.get(name)) for name in INPUT_NAMES)
        }
        shape = tuple(inputs["token_ids"].shape)
        if len(shape) != 2:
            raise ValueError(f"token_ids must have shape (batch, length), not {shape}.")
        for name in ("padding_mask", "segment_ids"):
            if inputs[name] is not None and tuple(inputs[name].shape) != shape:
                raise ValueError(f"{name} has shape {tuple(inputs[name].shape)}, token_ids {shape}.")
        self._warn_if_too_long(shape[1])
        check_token_ids(inputs["token_ids"], self.config.vocab_size)
        return inputs

    # Inside their compiled functions ids are not known any more, so arrays are checked before.

    def fit(self, x=None, *args, **kwargs):
        self._check_arrays(x)
        self.prepare_optimizer()  # before Keras does, which knows less of how its state is to be split
        fit = super().fit
        with prepared_fit(self, fit, x, *args, **kwargs) as arguments, processes.explained():
            arguments = on_mesh(arguments, fill=self._weighs_rows)
            if processes.count() > 1:  # Keras imports TensorFlow to serialise an optimizer: 450 MiB for nothing
                processes.check_same("what they train", training_settings(self, arguments))
            return fit(**arguments)

    def evaluate(self, x=None, *args, **kwargs):
        self._check_arrays(x)
        evaluate = super().evaluate
        with processes.explained():
            return evaluate(**on_mesh(all_arguments(evaluate, x, *args, **kwargs), fill=self._weighs_rows))

    def predict(self, x, *args, **kwargs):
        self._check_arrays(x)
        predict = super().predict
        arguments = on_mesh(all_arguments(predict, x, *args, **kwargs), fill=True)
        with processes.explained():
            outputs = predict(**arguments)
        real = arguments["x"].real if isinstance(arguments["x"], MeshBatches) else []
        filled = any(not rows.all() for rows in real)  # with rows, for the mesh
        return outputs[np.concatenate(real)[: len(outputs)]] if filled else outputs

    def predict_step(self, *args):
        outputs = super().predict_step(*args)
        if processes.count() > 1:  # with the state, on JAX
            outputs = (whole(outputs[0]), *outputs[1:])
        return outputs

    @property
    def _weighs_rows(self):
        """Whether rows of weight 0 do not change what is trained: not so with a loss of Keras's, a mean over rows."""
        return getattr(self, "_step", None) is not None

    def _check_arrays(self, x):
        check_model(self)
        ids = x.get("token_ids") if isinstance(x, dict) else x
        if isinstance(ids, np.ndarray):
            check_token_ids(ids, self.config.vocab_size)

    def _warn_if_too_long(self, length):
        limit = self.config.max_position_embeddings
        if length is not None and length > limit and not getattr(self, "_warned_of_length", False):
            self._warned_of_length = True
            warnings.warn(
                f"A row has {length} tokens, the model was made for max_position_embeddings={limit}; what lies beyond "
                f"may be of poor quality. from_pretrained(..., config={{'rope_scaling': ...}}) with YaRN extends it.",
                stacklevel=2,
            )

    @classmethod
    def parameter_table(cls, config):
        """The rows of `keras_qwen.parameters.parameter_table` for this kind of model."""
        return parameter_table(config, head=cls.has_head)

    @property
    def remat(self):
        """What the backward pass recomputes: None, `"block"`, `"attention"`, `"mlp"`, or n for every n-th block.

        May be set on a built model; the next `fit` traces its training function anew.
        """
        return self._remat

    @remat.setter
    def remat(self, policy):
        if isinstance(policy, int) and not isinstance(policy, bool) and policy >= 1:
            chosen = ["block" if i % policy == 0 else None for i in range(len(self.blocks))]
        else:
            chosen = [policy] * len(self.blocks)
        for block, block_policy in zip(self.blocks, chosen, strict=True):
            block.remat = block_policy
        self._remat = policy
        self.train_function = None

    def attention_summary(self, length, *, training=True):
        """Says which implementation of attention the layers use for rows of a length, here, and why if it is a choice.

        Args:
            length: tokens of a row.
            training: whether attention dropout, if the config has it, is on.

        Returns:
            A text of one line for each kind of layer.

        Example:
            >>> print(model.attention_summary(8192))
            24 layers, full attention: blockwise (asked for: auto) for 8192 tokens of float32 on tensorflow, cpu
        """
        asked, config, dtype = self.attention, self.config, self.dtype_policy.compute_dtype
        chosen = choose_implementation(
            implementation=asked,
            length=length,
            key_length=length,
            dtype=dtype,
            head_dim=config.head_dim,
            dropout=config.attention_dropout if training else 0.0,
        )
        windows = collections.Counter(config.window(i) for i in range(config.num_hidden_layers))
        where = f"for {length} tokens of {dtype} on {keras.backend.backend()}, {backend_module().device()}"
        return "\n".join(
            f"{count} layer{'s' if count > 1 else ''}, "
            f"{'full attention' if window is None else f'a window of {window} tokens'}: "
            f"{chosen} (asked for: {asked}) {where}"
            for window, count in windows.items()
        )

    def get_config(self):
        return {
            "config": self.config.to_hf(),
            "dtype": keras.dtype_policies.serialize(self.dtype_policy),
            "remat": self.remat,
            "attention": self.attention,
            "scan_blocks": self.scan_blocks,
            "name": self.name,
            "trainable": self.trainable,
            "frozen": self.frozen_paths() if self.trainable else None,
        }

    @classmethod
    def from_config(cls, config, custom_objects=None):
        config = dict(config)
        trainable, frozen = config.pop("trainable", True), config.pop("frozen", None)
        model = cls(QwenConfig.from_hf(config.pop("config")), **config)
        model.trainable = trainable
        if frozen is not None:
            model.restore_frozen_paths(frozen)
        return model

    @classmethod
    def from_pretrained(
        cls,
        source,
        *,
        dtype=None,
        remat=None,
        quantization=None,
        config=None,
        attention="auto",
        check_finite=False,
        revision=None,
        token=None,
        cache_dir=None,
        local_files_only=False,
    ):
        """Loads a Hugging Face checkpoint, tensor by tensor straight into the variables.

        Args:
            source: a folder with `config.json` and `*.safetensors`, or a Hub repository id.
            dtype: dtype policy of the model; default Keras's global policy. A policy whose variables cannot hold the
                checkpoint's values exactly warns.
            remat, attention: as of the class.
            quantization: `"int8"`, `"int4"` or `"nf4"`: the projections of the blocks are quantised while they are
                loaded, each when its turn comes, to 8, 4.4 or 4.1 bits a weight. Everything else stays in half
                precision where the checkpoint or `dtype` has it so. All is frozen: adapters are trained on top, see
                `enable_lora`. `dequantize` gives a model with full weights.
            config: a dict of settings that override `config.json`, e.g. a `rope_scaling`.
            check_finite: whether NaN and infinity in a tensor are errors.
            revision, token, cache_dir, local_files_only: passed to `huggingface_hub` for a Hub id.

        Returns:
            The model. For `QwenCausalLM`, with `tokenizer` and `generation_config` if the checkpoint has them.

        Raises:
            OSError: if files are missing, truncated or unreadable; the message names the file.
            ValueError: if config or tensors do not fit; the message names the tensor, the file and the remedy.

        Example:
            >>> model = QwenCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B-Instruct", dtype="mixed_bfloat16")
        """
        folder = hub.resolve(
            source, "model", revision=revision, token=token, cache_dir=cache_dir, local_files_only=local_files_only
        )
        settings = QwenConfig.from_json(folder / "config.json", **(config or {}))
        tensors = loading.CheckpointTensors(
            folder,
            quantized_table(cls.parameter_table(settings), quantization),
            tied=settings.tie_word_embeddings,
            with_head=cls.has_head,
            check_finite=check_finite,
        )
        if quantization is not None:
            dtype = quantized_policy(quantization, dtype, tensors.common_dtype())
        with deferred_initialization():
            model = cls(settings, dtype=dtype, remat=remat, attention=attention)
            tensors.initialize(model.variables)
        if quantization is not None:
            for variable in model.variables:
                variable.trainable = False
        model.source = saving.Source(folder, tensors.dtypes)
        model.name_or_path = str(source)
        return model

    def save_pretrained(self, folder, *, max_shard_size="5GB", dtype=None, tokenizer=None):
        """Writes the model in Hugging Face's form: config, weights, and the files that came with the checkpoint.

        Everything is written beside `folder` first and renamed at the end, so that a full disk or a kill leaves an
        older checkpoint in `folder` loadable.

        Args:
            folder: where to; created if missing.
            max_shard_size: `"5GB"`, `"500MB"` or a number of bytes; a model beyond it is split, with an index.
            dtype: `"float32"`, `"bfloat16"` or `"float16"` for all tensors; default: as the source checkpoint had
                them, or the variables' dtype for a model that was not loaded.
            tokenizer: a `QwenTokenizer` to save with the model; default: the files of the source checkpoint.

        Raises:
            OSError: if writing fails; nothing in `folder` has changed then.
            ValueError: for an unknown dtype or size.
        """
        self.check_saveable()
        saving.save(
            folder,
            config=self.config,
            table=self.parameter_table(self.config),
            variables=self.variables,
            source=self.source,
            max_shard_size=max_shard_size,
            dtype=dtype,
            tokenizer=tokenizer,
            generation_config=self.generation_config_to_save(),
        )

    def check_saveable(self):
        """Raises ValueError where `save_pretrained` would leave something out."""
        self.check_not_quantized("save_pretrained")
        if any(variable.trainable and is_adapter_path(variable.path) for variable in self.weights):
            raise ValueError("An adapter is active: save the language model, after merge_adapter, or its adapter.")

    def generation_config_to_save(self):
        """The generation settings to write; None leaves them as they came with the checkpoint."""
        return None

    def push_to_hub(self, repo_id, *, token=None, private=None, commit_message="Upload model", **save_arguments):
        """Saves the model to a temporary folder and uploads it to the Hugging Face Hub.

        Args:
            repo_id: `"user/name"`; created if missing.
            token, private, commit_message: passed to `huggingface_hub`.
            **save_arguments: of `save_pretrained`.

        Returns:
            The address of the commit.
        """
        return hub.push(
            lambda folder: self.save_pretrained(folder, **save_arguments),
            repo_id,
            token=token,
            private=private,
            commit_message=commit_message,
        )


def check_token_ids(token_ids, vocab_size):
    """Raises ValueError for ids outside of the vocabulary, wherever their values are known (not while tracing)."""
    values = concrete_value(token_ids)
    if values is None or not values.size:
        return
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"token_ids hold {low if low < 0 else high}; this model's vocabulary has ids 0 to {vocab_size - 1}. "
            f"Does the tokenizer belong to the model?"
        )
