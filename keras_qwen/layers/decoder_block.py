"""DecoderBlock and CheckpointedDecoderBlock: one layer of the model, the latter recomputing itself."""

import keras

from keras_qwen.config import QwenConfig
from keras_qwen.layers.grouped_query_attention import GroupedQueryAttention
from keras_qwen.layers.lora import Adaptable, repeatable
from keras_qwen.layers.rms_norm import RMSNorm
from keras_qwen.layers.swiglu_mlp import SwiGLUMLP
from keras_qwen.ops.placement import placed

REMAT_POLICIES = (None, "block", "attention", "mlp")
# What the dimensions of the hidden states count: between the parts of a block, and inside of them.
RESIDUAL, WHOLE = ("batch", "residual", "embed"), ("batch", "length", "embed")


@keras.saving.register_keras_serializable(package="keras_qwen")
class DecoderBlock(keras.layers.Layer):
    """One pre-norm Transformer layer: attention and feed-forward network, each added to its input.

    Args:
        config: `QwenConfig`.
        layer_index: which layer of the model this is; decides on its sliding window.
        remat: what the backward pass recomputes rather than keeps: None, `"block"`, `"attention"` or `"mlp"`. May be
            set on a built block; takes effect when its function is next traced.
        implementation: of `keras_qwen.ops.attention`.

    Call arguments:
        hidden: tensor (batch, length, hidden_size).
        rope, segment_ids, attention_mask, cache, cache_index: as of `GroupedQueryAttention`; what is not given, the
            block makes itself.

    Returns:
        Tensor (batch, length, hidden_size); with a cache `(output, new_cache)`.

    Example:
        >>> config = QwenConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        ...                     num_key_value_heads=2, vocab_size=100)
        >>> DecoderBlock(config)(keras.ops.ones((1, 5, 32))).shape
        (1, 5, 32)
    """

    def __init__(self, config, layer_index=0, remat=None, implementation="auto", **kwargs):
        super().__init__(**kwargs)
        self.config = QwenConfig.from_hf(config) if isinstance(config, dict) else config
        self.layer_index = layer_index
        self.remat = remat
        self.implementation = implementation
        self.supports_masking = True

    @property
    def remat(self):
        """What the backward pass recomputes; one of `REMAT_POLICIES`."""
        return self._remat

    @remat.setter
    def remat(self, policy):
        if policy not in REMAT_POLICIES:
            raise ValueError(f"remat={policy!r} is not known to a block; known are {REMAT_POLICIES}.")
        self._remat = policy

    def build(self, hidden_shape):
        config, part = self.config, dict(dtype=self.dtype_policy)
        initializer = keras.initializers.RandomNormal(stddev=config.initializer_range)
        self.input_layernorm = RMSNorm(config.rms_norm_eps, name="input_layernorm", **part)
        self.self_attn = GroupedQueryAttention(
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            attention_bias=config.attention_bias,
            output_bias=config.output_bias,
            qk_norm=config.qk_norm,
            rms_norm_eps=config.rms_norm_eps,
            sliding_window=config.window(self.layer_index),
            attention_dropout=config.attention_dropout,
            rope_parameters=dict(config.rope_parameters),
            max_position_embeddings=config.max_position_embeddings,
            kernel_initializer=initializer,
            implementation=self.implementation,
            name="self_attn",
            **part,
        )
        self.post_attention_layernorm = RMSNorm(config.rms_norm_eps, name="post_attention_layernorm", **part)
        self.mlp = SwiGLUMLP(config.intermediate_size, kernel_initializer=initializer, name="mlp", **part)
        for layer in (self.input_layernorm, self.self_attn, self.post_attention_layernorm, self.mlp):
            layer.build(hidden_shape)

    def call(
        self,
        hidden,
        rope=None,
        segment_ids=None,
        attention_mask=None,
        cache=None,
        cache_index=None,
        training=None,
        mask=None,
    ):
        seed = self.self_attn.draw_seed(training)
        given = dict(rope=rope, segment_ids=segment_ids, attention_mask=attention_mask, mask=mask, training=training)

        # `training` is said: TensorFlow's backward pass calls this outside of the layers that would pass it on.
        def mlp_part(x):
            normalized = placed(self.post_attention_layernorm(x), *WHOLE)
            return x + placed(self.mlp(normalized, training=training), *RESIDUAL, gradient=WHOLE)

        if cache is not None:
            attended, cache = self.self_attn(
                self.input_layernorm(hidden), cache=cache, cache_index=cache_index, **given
            )
            return mlp_part(hidden + attended), cache

        # Closures of one tensor: all else is captured, as keras.remat needs it on TensorFlow.
        def attention_part(x):
            normalized = placed(self.input_layernorm(x), *WHOLE)
            return x + placed(self.self_attn(normalized, seed=seed, **given), *RESIDUAL, gradient=WHOLE)

        hidden = placed(hidden, *RESIDUAL)
        policy = self.remat if training and not isinstance(hidden, keras.KerasTensor) else None
        if policy == "block":
            return self._recomputed(lambda x: mlp_part(attention_part(x)))(hidden)
        if policy == "attention":
            return mlp_part(self._recomputed(attention_part)(hidden))
        if policy == "mlp":
            return self._recomputed(mlp_part)(attention_part(hidden))
        return mlp_part(attention_part(hidden))

    def _recomputed(self, function):
        projections = [layer for layer in self._flatten_layers() if isinstance(layer, Adaptable)]
        return keras.remat(repeatable(function, projections))

    def compute_output_shape(self, hidden_shape, *args, **kwargs):
        return hidden_shape

    def get_config(self):
        return {
            **super().get_config(),
            "config": self.config.to_hf(),
            "layer_index": self.layer_index,
            "remat": self.remat,
            "implementation": self.implementation,
        }


@keras.saving.register_keras_serializable(package="keras_qwen")
class CheckpointedDecoderBlock(DecoderBlock):
    """A `DecoderBlock` that keeps only its input for the backward pass and recomputes the rest there.

    Works under `fit`, in `keras.Model`s of one's own and under every dtype policy. Dropout draws the same numbers
    when it is recomputed.

    Args:
        config, layer_index, implementation: as of `DecoderBlock`.
        remat: `"block"` (default), or only `"attention"` or `"mlp"`.

    Example:
        >>> inputs = keras.Input((None, 32))
        >>> model = keras.Model(inputs, CheckpointedDecoderBlock(config)(inputs))

    Reference: Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174.
    """

    def __init__(self, config, layer_index=0, remat="block", **kwargs):
        super().__init__(config, layer_index, remat=remat, **kwargs)
