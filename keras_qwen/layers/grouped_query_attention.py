"""GroupedQueryAttention."""

from functools import partial

import keras
from keras import ops

from keras_qwen.layers.documents import document_positions, given
from keras_qwen.layers.projection import build_projection
from keras_qwen.layers.rms_norm import RMSNorm
from keras_qwen.layers.rotary_embedding import RotaryEmbedding, apply_rotary_embedding
from keras_qwen.ops.attention import attention
from keras_qwen.ops.attention_cached import cached_attention, write_cache
from keras_qwen.ops.placement import placed


@keras.saving.register_keras_serializable(package="keras_qwen")
class GroupedQueryAttention(keras.layers.Layer):
    """Causal self-attention with rotary positions, where groups of query heads share a key/value head.

    Args:
        num_attention_heads: number of query heads.
        num_key_value_heads: number of key/value heads, a divisor of `num_attention_heads`; default: as many.
        head_dim: size of a head; default `hidden_size // num_attention_heads`.
        attention_bias: whether q, k and v projections have a bias.
        output_bias: whether the output projection has one.
        qk_norm: whether each query and key head is RMS-normalised before its rotation (Qwen3).
        rms_norm_eps: of those norms.
        sliding_window: how many tokens back a token sees, itself included; None for all.
        attention_dropout: rate of dropout on the attention probabilities while training.
        rope_theta, rope_parameters, max_position_embeddings: of the tables it makes when it is given none; see
            `RotaryEmbedding`.
        kernel_initializer: of the projections.
        implementation: of `keras_qwen.ops.attention`.

    Call arguments:
        hidden: tensor (batch, length, hidden_size).
        rope: `(cos, sin)` of `RotaryEmbedding`; made from the positions in each document if not given.
        segment_ids: integers (batch, length), 0 = padding; tokens of different segments do not see each other.
        attention_mask: boolean (batch or 1, length, keys), True = sees. Replaces causality, segments and window.
        cache: `(keys, values)`, each (batch, num_key_value_heads, capacity, head_dim): this call's keys and values are
            written at `cache_index`. With an `attention_mask` the queries see the cache's keys, without one (the first
            call on an empty cache) just this call's.
        cache_index: integer scalar.
        mask: a Keras mask (batch, length); used where `segment_ids` is not given.

    Returns:
        Tensor (batch, length, hidden_size); with a cache `(output, new_cache)`.

    Raises:
        ValueError: where the head counts do not divide.

    Example:
        >>> layer = GroupedQueryAttention(num_attention_heads=4, num_key_value_heads=2)
        >>> layer(keras.ops.ones((1, 5, 32))).shape
        (1, 5, 32)

    Reference: Ainslie et al., 2023, "GQA", arXiv:2305.13245.
    """

    def __init__(
        self,
        num_attention_heads,
        num_key_value_heads=None,
        head_dim=None,
        *,
        attention_bias=False,
        output_bias=False,
        qk_norm=False,
        rms_norm_eps=1e-6,
        sliding_window=None,
        attention_dropout=0.0,
        rope_theta=10000.0,
        rope_parameters=None,
        max_position_embeddings=32768,
        kernel_initializer="glorot_uniform",
        implementation="auto",
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads or num_attention_heads
        if num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {num_attention_heads} is no multiple of "
                f"num_key_value_heads {num_key_value_heads}."
            )
        self.head_dim = head_dim
        self.attention_bias = attention_bias
        self.output_bias = output_bias
        self.qk_norm = qk_norm
        self.rms_norm_eps = rms_norm_eps
        self.sliding_window = sliding_window
        self.attention_dropout = attention_dropout
        self.rope_theta = rope_theta
        self.rope_parameters = rope_parameters
        self.max_position_embeddings = max_position_embeddings
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.implementation = implementation
        self.supports_masking = True
        self.seed_generator = keras.random.SeedGenerator() if attention_dropout else None

    def build(self, hidden_shape):
        hidden_size = hidden_shape[-1]
        if self.head_dim is None:
            if hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"hidden_size {hidden_size} is no multiple of num_attention_heads {self.num_attention_heads}; "
                    f"set head_dim."
                )
            self.head_dim = hidden_size // self.num_attention_heads
        make = partial(build_projection, self, kernel_initializer=self.kernel_initializer)
        width, kv_width = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        self.q_proj = make("q_proj", width, hidden_shape, use_bias=self.attention_bias)
        self.k_proj = make("k_proj", kv_width, hidden_shape, use_bias=self.attention_bias)
        self.v_proj = make("v_proj", kv_width, hidden_shape, use_bias=self.attention_bias)
        self.o_proj = make("o_proj", hidden_size, (*hidden_shape[:-1], width), use_bias=self.output_bias)
        if self.qk_norm:
            self.q_norm = RMSNorm(self.rms_norm_eps, dtype=self.dtype_policy, name="q_norm")
            self.k_norm = RMSNorm(self.rms_norm_eps, dtype=self.dtype_policy, name="k_norm")
            self.q_norm.build((None, None, None, self.head_dim))
            self.k_norm.build((None, None, None, self.head_dim))
        self._own_rope = RotaryEmbedding(
            self.head_dim, self.rope_theta, self.rope_parameters, self.max_position_embeddings, name="rotary_emb"
        )

    def call(
        self,
        hidden,
        rope=None,
        segment_ids=None,
        attention_mask=None,
        cache=None,
        cache_index=None,
        seed=None,
        training=None,
        mask=None,
    ):
        segment_ids, attention_mask = given(segment_ids), given(attention_mask)
        if segment_ids is None and mask is not None:
            segment_ids = ops.cast(mask, "int32")
        cos, sin = rope if rope is not None else self._own_rope(document_positions(segment_ids, hidden))
        query = self._heads(self.q_proj(hidden), self.num_attention_heads, "heads")
        key = self._heads(self.k_proj(hidden), self.num_key_value_heads, "kv_heads")
        value = self._heads(self.v_proj(hidden), self.num_key_value_heads, "kv_heads")
        if self.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = apply_rotary_embedding(query, cos, sin), apply_rotary_embedding(key, cos, sin)
        if cache is not None:
            cache = tuple(write_cache(old, new, cache_index) for old, new in zip(cache, (key, value), strict=True))
        if cache is not None and attention_mask is not None:
            context = cached_attention(query, *cache, attention_mask, self.head_dim**-0.5)
        else:
            dropout = self.attention_dropout if training else 0.0
            context = attention(
                query,
                key,
                value,
                segment_ids=segment_ids if attention_mask is None else None,
                mask=attention_mask,
                sliding_window=self.sliding_window if attention_mask is None else None,
                dropout=dropout,
                seed=self.draw_seed(training) if dropout and seed is None else seed,
                implementation=self.implementation,
            )
        output = self.o_proj(ops.reshape(context, (*ops.shape(context)[:2], self.num_attention_heads * self.head_dim)))
        return output if cache is None else (output, cache)

    def _heads(self, x, heads, axis):
        return placed(ops.reshape(x, (*ops.shape(x)[:2], heads, self.head_dim)), "batch", "length", axis, "head_dim")

    def draw_seed(self, training):
        """The seed of one call's dropout; drawn outside of what is recomputed, it is the same the second time."""
        return self.seed_generator.next() if training and self.seed_generator is not None else None

    def compute_output_shape(self, hidden_shape, *args, **kwargs):
        return hidden_shape

    def get_config(self):
        names = (
            "num_attention_heads num_key_value_heads head_dim attention_bias output_bias qk_norm rms_norm_eps "
            "sliding_window attention_dropout rope_theta rope_parameters max_position_embeddings implementation"
        )
        return {
            **super().get_config(),
            **{name: getattr(self, name) for name in names.split()},
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
        }
