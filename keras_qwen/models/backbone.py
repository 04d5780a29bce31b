"""QwenBackbone: token ids to hidden states."""

import keras

from keras_qwen.layers.attention_masks import AttentionMasks
from keras_qwen.layers.decoder_block import DecoderBlock
from keras_qwen.layers.documents import Documents
from keras_qwen.layers.rms_norm import RMSNorm
from keras_qwen.layers.rotary_embedding import RotaryEmbedding
from keras_qwen.layers.token_embedding import TokenEmbedding
from keras_qwen.models.base import INPUT_NAMES, QwenModel


@keras.saving.register_keras_serializable(package="keras_qwen")
class QwenBackbone(QwenModel):
    """The Transformer without its head.

    Args:
        config: `QwenConfig`.
        dtype: a dtype policy or its name; default Keras's global policy.
        remat: what the backward pass recomputes: None, `"block"`, `"attention"`, `"mlp"`, or n for every n-th block.
        attention: implementation of `keras_qwen.ops.attention`, `"auto"` by default.
        scan_blocks: see the property.

    Call arguments:
        inputs: a dict with `token_ids` (batch, length), and optionally `padding_mask`, `segment_ids`, `position_ids`
            of the same shape; or token ids alone.

    Returns:
        Hidden states (batch, length, hidden_size), after the final norm.

    Example:
        >>> backbone = QwenBackbone(QwenConfig.from_pretrained("Qwen/Qwen2.5-0.5B"))  # doctest: +SKIP
        >>> backbone({"token_ids": [[1, 2, 3]]}).shape  # doctest: +SKIP
        (1, 3, 896)
    """

    has_head = False

    def __init__(self, config, dtype=None, remat=None, attention="auto", scan_blocks=False, name="model", **kwargs):
        policy = keras.dtype_policies.get(dtype or keras.config.dtype_policy())
        part = dict(dtype=policy)
        initializer = keras.initializers.RandomNormal(stddev=config.initializer_range)
        inputs = {
            key: keras.Input((None,), dtype="int32", name=key, optional=key != "token_ids") for key in INPUT_NAMES
        }
        embed = TokenEmbedding(
            config.vocab_size, config.hidden_size, embeddings_initializer=initializer, name="embed_tokens", **part
        )
        rotary = RotaryEmbedding(
            config.head_dim,
            rope_parameters=dict(config.rope_parameters),
            max_position_embeddings=config.max_position_embeddings,
            name="rotary_emb",
        )
        windows = tuple(dict.fromkeys(config.window(i) for i in range(config.num_hidden_layers)))
        masks = AttentionMasks(windows, attention, config.attention_dropout, name="attention_masks", **part)
        blocks = [
            DecoderBlock(config, i, implementation=attention, name=f"layers_{i}", **part)
            for i in range(config.num_hidden_layers)
        ]
        norm = RMSNorm(config.rms_norm_eps, name="norm", **part)

        documents = Documents(name="documents")

        hidden = embed(inputs["token_ids"])
        segment_ids, position_ids = documents(**inputs)
        rope = rotary(position_ids)
        made = dict(zip(windows, masks(hidden, segment_ids), strict=True))
        for i, block in enumerate(blocks):
            hidden = block(hidden, rope=rope, segment_ids=segment_ids, attention_mask=made[config.window(i)])
        hidden = norm(hidden)
        super().__init__(inputs=inputs, outputs=hidden, name=name, **kwargs)
        self.dtype_policy = policy
        self.config = config
        self.attention = attention
        self.embed_tokens, self.rotary_emb, self.norm = embed, rotary, norm
        self.documents, self.attention_masks = documents, masks
        self.blocks = blocks
        self.remat = remat
        self.scan_blocks = scan_blocks

    @property
    def scan_blocks(self):
        """Whether all blocks run as one `jax.lax.scan`, so that the step compiles in the time of one block.

        On JAX, for blocks that are alike (same `remat`, no sliding window of some alone) and without dropout. Names,
        checkpoints and layouts do not change; each step copies the blocks' weights, in the compute dtype, and their
        gradients. May be set on a built model.
        """
        return self._scan_blocks

    @scan_blocks.setter
    def scan_blocks(self, on):
        if on and keras.backend.backend() != "jax":
            raise ValueError(f"scan_blocks is there on JAX alone, not on {keras.backend.backend()}.")
        self._scan_blocks = bool(on)
        self.train_function = self.test_function = self.predict_function = None

    def call(self, inputs, training=None, mask=None):
        if not self._scan_blocks:
            return super().call(inputs, training=training)
        from keras_qwen.models import scan_blocks_jax

        scan_blocks_jax.check_alike(self.blocks)
        inputs = self.complete_inputs(inputs)
        hidden = self.embed_tokens(inputs["token_ids"])
        segment_ids, position_ids = self.documents(**inputs)
        masks = self.attention_masks(hidden, segment_ids, training=training)
        hidden = scan_blocks_jax.scan_blocks(
            self.blocks,
            hidden,
            rope=self.rotary_emb(position_ids),
            segment_ids=segment_ids,
            attention_mask=masks[0],
            training=training,
        )
        return self.norm(hidden)

    def call_with_cache(self, token_ids, position_ids, cache, cache_index, attention_mask=None, segment_ids=None):
        """One step of decoding.

        Args:
            token_ids: integers (batch, length), the new tokens.
            position_ids: integers (batch, length), their positions.
            cache: for each layer `(keys, values)`, each (batch, kv_heads, capacity, head_dim).
            cache_index: integer scalar, where the new tokens' keys go.
            attention_mask: {window: boolean (batch or 1, length, capacity)} for each sliding window of the config
                (None for full attention), or None for the first call on an empty cache.
            segment_ids: integers (batch, length), 0 = padding; for the first call.

        Returns:
            `(hidden, cache)`: (batch, length, hidden_size), and the cache with the new keys and values.
        """
        hidden = self.embed_tokens(token_ids)
        rope = self.rotary_emb(position_ids)
        updated = []
        for i, (block, layer_cache) in enumerate(zip(self.blocks, cache, strict=True)):
            hidden, layer_cache = block(
                hidden,
                rope=rope,
                segment_ids=segment_ids,
                attention_mask=None if attention_mask is None else attention_mask[self.config.window(i)],
                cache=layer_cache,
                cache_index=cache_index,
            )
            updated.append(layer_cache)
        return self.norm(hidden), updated
