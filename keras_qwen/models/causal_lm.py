"""QwenCausalLM: a Qwen language model that trains under `fit`, generates, and is saved in Hugging Face's form."""

import contextlib
import warnings

import keras

from keras_qwen.generation import Generator, read_generation_config, read_tokenizer
from keras_qwen.layers.projection import Projection
from keras_qwen.models.adapters import AdapterMethods
from keras_qwen.models.backbone import QwenBackbone
from keras_qwen.models.base import QwenModel
from keras_qwen.models.fit_check import warn_if_too_large
from keras_qwen.models.resizing import ResizingMethods
from keras_qwen.models.scoring import ScoringMethods
from keras_qwen.ops.attention_backend import backend_module
from keras_qwen.ops.linear_cross_entropy import linear_cross_entropy
from keras_qwen.ops.placement import build_optimizer, on_dtensor, placed
from keras_qwen.ops.row_matmul import row_matmul
from keras_qwen.training.preference import DPO, PreferenceStep
from keras_qwen.training.step import TokenStep


@keras.saving.register_keras_serializable(package="keras_qwen")
class QwenCausalLM(AdapterMethods, ResizingMethods, ScoringMethods, QwenModel):
    """Qwen with its language-model head.

    Args:
        config: `QwenConfig`.
        dtype: a dtype policy or its name; default Keras's global policy.
        remat: what the backward pass recomputes: None, `"block"`, `"attention"`, `"mlp"`, or n for every n-th block.
        attention: implementation of `keras_qwen.ops.attention`, `"auto"` by default.
        scan_blocks: whether all blocks run as one `jax.lax.scan`; see `QwenBackbone.scan_blocks`.

    Call arguments:
        inputs: a dict with `token_ids` (batch, length), and optionally of the same shape `padding_mask` (1 = real
            token), `segment_ids` (documents packed in a row are numbered from 1, 0 = padding; no token sees another
            document) and `position_ids` (default: the index inside the document); or token ids alone.

    Returns:
        Logits (batch, length, vocab_size).

    Example:
        >>> model = QwenCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B-Instruct", dtype="mixed_bfloat16")
        >>> model.compile(keras.optimizers.AdamW(1e-5))
        >>> model.fit({"token_ids": ids, "padding_mask": mask}, labels, sample_weight=loss_weights, batch_size=4)
        >>> model.generate("Why is the sky blue?", max_new_tokens=50)
        >>> model.save_pretrained("my-qwen")

    References: Qwen2, arXiv:2407.10671; Qwen3, arXiv:2505.09388.
    """

    _generator = _tokenizer = _generation_config = None

    def __init__(
        self, config, dtype=None, remat=None, attention="auto", scan_blocks=False, name="qwen_causal_lm", **kwargs
    ):
        backbone = QwenBackbone(config, dtype=dtype, remat=None, attention=attention)
        if config.tie_word_embeddings:
            head = None
            logits = backbone.embed_tokens(backbone.output, reverse=True)
        else:
            head = Projection(
                config.vocab_size,
                use_bias=False,
                kernel_initializer=keras.initializers.RandomNormal(stddev=config.initializer_range),
                dtype=backbone.dtype_policy,
                name="lm_head",
            )
            logits = head(backbone.output)
        super().__init__(inputs=backbone.input, outputs=logits, name=name, **kwargs)
        self.dtype_policy = backbone.dtype_policy
        self.config = config
        self.attention = attention
        self.backbone, self.lm_head, self.blocks = backbone, head, backbone.blocks
        self.remat = remat
        self.scan_blocks = scan_blocks
        self._step = None

    @property
    def scan_blocks(self):
        """As of `QwenBackbone`."""
        return self.backbone.scan_blocks

    @scan_blocks.setter
    def scan_blocks(self, on):
        self.backbone.scan_blocks = on
        self.train_function = self.test_function = self.predict_function = None

    def call(self, inputs, training=None, mask=None):
        if not self.scan_blocks:
            return super().call(inputs, training=training)
        return self._head(self.backbone(inputs, training=training))

    def head_kernel(self):
        """`(kernel, transposed)` of the head: (hidden_size, vocab), or the embeddings (vocab, hidden_size) if tied."""
        if self.lm_head is None:
            return self.backbone.embed_tokens.head, True
        return self.lm_head.current_weight, False

    def token_loss(self, inputs, labels, weights, training=False):
        """Sums over a batch of loss, right tokens and weights, without the logits of the batch ever existing.

        Args:
            inputs: as of the model.
            labels: integers (batch, length), the token that follows each position.
            weights: float32 (batch, length).

        Returns:
            `keras_qwen.ops.linear_cross_entropy`'s `TokenLoss`.
        """
        hidden, kernel, head = self.hidden_and_head(inputs, training)
        return linear_cross_entropy(hidden, kernel, labels, weights, training=training, **head)

    def hidden_and_head(self, inputs, training=False):
        """The hidden states, and the head to multiply them with.

        Returns:
            `(hidden, kernel, arguments)`; the arguments, `transposed` and `kernel_trainable`, are those of
            `keras_qwen.ops.linear_cross_entropy` and `token_log_probs`, one of which must be the kernel's only use.
        """
        kernel, transposed = self.head_kernel()
        # One array for both gradients of a tied matrix, if it has any.
        shares = transposed and kernel.trainable and kernel is self.backbone.embed_tokens.current_weight
        sharing = self.backbone.embed_tokens.sharing() if shares else contextlib.nullcontext()
        with sharing as shared, self.dropout_seeds(training):
            hidden = placed(self.backbone(inputs, training=training), "batch", "length", "embed")
        arguments = {"transposed": transposed, "kernel_trainable": kernel.trainable}
        return hidden, shared.table if shares else kernel, arguments

    @property
    def tokenizer(self):
        """The `QwenTokenizer` of the loaded checkpoint, read when first asked for; None without one. May be set."""
        if self._tokenizer is None and self.source is not None:
            self._tokenizer = read_tokenizer(self.source.folder)
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer):
        self._tokenizer = tokenizer

    @property
    def generation_config(self):
        """What the checkpoint's generation_config.json says, a dict: the defaults of `generate`. May be set.

        Without such a file: the end-of-text ids of config.json.
        """
        if self._generation_config is None:
            read = {} if self.source is None else read_generation_config(self.source.folder)
            ends = self.config.extra.get("eos_token_id")
            self._generation_config = read or ({} if ends is None else {"eos_token_id": ends})
        return self._generation_config

    @generation_config.setter
    def generation_config(self, settings):
        self._generation_config = settings

    def generation_config_to_save(self):
        read = {} if self.source is None else read_generation_config(self.source.folder)
        return None if self.generation_config == read else self.generation_config

    def generate(
        self,
        inputs,
        *,
        max_new_tokens=None,
        temperature=None,
        top_k=None,
        top_p=None,
        min_p=None,
        repetition_penalty=None,
        stop=None,
        seed=None,
        sampler=None,
        stream=False,
    ):
        """Continues prompts token by token, with a key/value cache.

        What is None comes from `model.generation_config`, the checkpoint's generation_config.json; what is not there,
        either, has transformers' default: greedy unless it says `do_sample` or a temperature, top_k, top_p or min_p is
        passed here.

        Args:
            inputs: one prompt or several. A text or a list of texts; chat messages (a list of dicts) or a list of
                chats, which go through the chat template; token ids (a list) or a list or 2-D array of them.
            max_new_tokens: tokens at most; default 256, or as many as the context has left.
            temperature: logits are divided by it; 0 = greedy, the likeliest token each time. Default 1.
            top_k: only the k likeliest tokens can come; 0 = off. Default 50.
            top_p: only the likeliest tokens that together have this probability can come; 1 = off, the default.
            min_p: only tokens with this fraction of the likeliest one's probability can come; 0 = off, the default.
            repetition_penalty: logits of tokens in the prompt and the continuation are divided by it where positive,
                multiplied where negative; 1 = off, the default.
            stop: texts and token ids that end a continuation, besides the checkpoint's `eos_token_id`; one or a list of
                them. `[]` turns every stop off, the checkpoint's too.
            seed: integer that makes sampling reproducible on a backend; None follows `keras.utils.set_random_seed`.
            sampler: a KerasHub sampler or its name; takes the place of temperature, top_k, top_p, min_p and seed.
            stream: whether to return an iterator of pieces as they come.

        Returns:
            The continuation alone, without what ended it, in kind: a str for a text or a chat, a list of str for
            several, a list of lists of ids for ids (for one prompt of ids, too). Texts are without special tokens. With
            `stream`, an iterator: of texts that never end within a character, or of ids; for several prompts of
            lists with each row's new text or ids.

        Raises:
            ValueError: for empty prompts, ids out of the vocabulary, text without a tokenizer, or a setting out of its
                range.

        Example:
            >>> model.generate("Why is the sky blue?", max_new_tokens=50, temperature=0)
            >>> model.generate([{"role": "user", "content": "Hello!"}], top_p=0.9, seed=1)
            >>> for piece in model.generate("Once upon a time", stop=["."], stream=True):
            ...     print(piece, end="", flush=True)
        """
        if self.has_changed("generate") or self._generator is None:
            self._generator = Generator(
                self.config,
                call_with_cache=self.backbone.call_with_cache,
                head=self._head,
                weights=lambda: self.weights,
                cache_dtype=self.dtype_policy.compute_dtype,
                check_length=self._warn_if_too_long,
            )
        return self._generator.generate(
            inputs,
            tokenizer=self.tokenizer,
            generation_config=self.generation_config,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            stop=stop,
            seed=seed,
            sampler=sampler,
            stream=stream,
        )

    def _head(self, hidden):
        kernel, transposed = self.head_kernel()
        if keras.backend.standardize_dtype(hidden.dtype) != "float32":  # which takes a narrower kernel as it is
            kernel = keras.ops.cast(kernel, hidden.dtype)
        return row_matmul(hidden, keras.ops.convert_to_tensor(kernel), transposed)

    def compile(self, optimizer="adamw", loss=None, *, micro_batch_size=None, jit_compile="auto", **kwargs):
        """Configures training.

        Args:
            optimizer: any Keras optimizer.
            loss: None for the memory-saving next-token loss, `sum(w * ce) / sum(w)` over the whole batch, where the
                logits of a batch never exist; `logs` then have `loss` and `token_accuracy`, weighted by tokens.
                `keras_qwen.training.DPO` for pairs of answers, as lean. A Keras loss gets ordinary logits (batch,
                length, vocab_size).
            micro_batch_size: rows that are computed at once. A batch is split, gradients are added up, and there is one
                update a batch: memory follows the micro-batch, the result does not change.
            jit_compile: as in Keras, but `"auto"` leaves TensorFlow's graph as it is on a CPU: there a step of it needs
                less time and memory than XLA's, and seconds instead of minutes to start.
            **kwargs: of `keras.Model.compile`.

        Raises:
            ValueError: for settings that do not go together; the message says which.
        """
        self._step = self._own_step(loss, micro_batch_size)
        if self._step is not None:
            for name in ("metrics", "weighted_metrics", "loss_weights"):
                if kwargs.get(name) is not None:
                    raise ValueError(
                        f"{name} need logits, which the memory-saving loss never makes; pass a Keras loss."
                    )
        elif micro_batch_size is not None:
            raise ValueError("micro_batch_size works with the memory-saving loss only: leave out loss.")
        self._asked_jit_compile, self._asked_loss = jit_compile, loss
        keras_loss = loss if self._step is None else None
        super().compile(optimizer=optimizer, loss=keras_loss, jit_compile=_jit(jit_compile), **kwargs)
        self._check_optimizer(micro_batch_size)

    def complete_inputs(self, inputs):
        if self._step is not None and isinstance(inputs, dict):
            inputs = {name: value for name, value in inputs.items() if name not in self._step.own_inputs}
        return super().complete_inputs(inputs)

    def fit(self, x=None, *args, **kwargs):
        if isinstance(self._step, PreferenceStep) and isinstance(x, dict) and kwargs.get("shuffle", True):
            raise ValueError("Shuffling rows would part the pairs: pass shuffle=False, or a dataset of pairs.")
        if isinstance(self._step, TokenStep):
            warn_if_too_large(self, x, kwargs.get("batch_size"))
        return super().fit(x, *args, **kwargs)

    def _own_step(self, loss, micro_batch_size):
        if loss is None:
            return TokenStep(self.token_loss, micro_batch_size)
        if isinstance(loss, DPO):
            return PreferenceStep(loss, self.token_log_probs, self.base_log_probs, micro_batch_size)
        return None

    def _check_optimizer(self, micro_batch_size):
        inner = getattr(self.optimizer, "inner_optimizer", self.optimizer)
        if micro_batch_size is not None and inner.gradient_accumulation_steps:
            raise ValueError(
                "micro_batch_size and the optimizer's gradient_accumulation_steps both accumulate gradients; use "
                "micro_batch_size, which weighs by tokens and leaves no step unapplied."
            )
        rounds = getattr(inner, "stochastic_rounding", False)
        half = {variable.dtype for variable in self.trainable_variables} & {"bfloat16", "float16"}
        if half and not rounds:
            warnings.warn(
                f"Weights that are trained are {' and '.join(sorted(half))}: updates smaller than 1/256 of a weight "
                f"vanish when they are rounded, so that small learning rates train nothing. Use "
                f"dtype='mixed_bfloat16', or keras_qwen.training.AdamW with stochastic_rounding=True.",
                stacklevel=3,
            )

    @property
    def micro_batch_size(self):
        """Rows that are computed at once, as given to `compile`; None for whole batches."""
        return None if self._step is None else self._step.micro_batch_size

    def get_compile_config(self):
        config = super().get_compile_config()
        if not config:
            return config
        own = {"micro_batch_size": self.micro_batch_size, "jit_compile": self._asked_jit_compile}
        return {**config, **own, "loss": keras.saving.serialize_keras_object(self._asked_loss)}

    def compile_from_config(self, config):
        self.compile(**keras.saving.deserialize_keras_object(config))
        build_optimizer(self.optimizer, self.trained_variables())

    @property
    def metrics(self):
        return super().metrics + (self._step.metrics if self._step is not None else [])

    def train_step(self, *args):
        if self._step is None:
            return super().train_step(*args)
        return self._step.backend.train_step(self._step, self, *args)

    def test_step(self, *args):
        if self._step is None:
            return super().test_step(*args)
        return self._step.backend.test_step(self._step, self, *args)


def _jit(jit_compile):
    """Keras's `jit_compile`, with what `"auto"` means here."""
    if on_dtensor():
        if jit_compile is True:
            raise ValueError("jit_compile=True does not work on a mesh of TensorFlow's: leave it out.")
        return False
    if jit_compile == "auto" and keras.backend.backend() == "tensorflow" and backend_module().device() == "cpu":
        return False
    return jit_compile
