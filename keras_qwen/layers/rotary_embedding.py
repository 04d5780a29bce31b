"""RotaryEmbedding: tables of cosines and sines, made once for all layers of a forward pass."""

import math

import keras
import numpy as np
from keras import ops

from keras_qwen.config import normalise_rope


@keras.saving.register_keras_serializable(package="keras_qwen")
class RotaryEmbedding(keras.layers.Layer):
    """Rotary position embedding: the angles of each position, as cosines and sines.

    Angles are computed in float32 under every dtype policy. The tables go to `apply_rotary_embedding`, or to the
    `rope` argument of `GroupedQueryAttention` and the decoder blocks.

    Args:
        head_dim: size of one attention head, even.
        rope_theta: base of the frequencies; a `rope_theta` in `rope_parameters` wins.
        rope_parameters: Hugging Face's dict with `rope_type` (default, linear, dynamic, yarn or llama3) and the
            type's settings. The form `rope_scaling` with `type` is read too.
        max_position_embeddings: the original context length where `rope_parameters` does not say it.

    Call arguments:
        position_ids: integer tensor (batch or 1, length).

    Returns:
        `(cos, sin)`, float32 tensors (batch or 1, length, head_dim // 2), with the attention factor multiplied in.

    Raises:
        ValueError: for an unknown `rope_type`, a missing setting or an odd `head_dim`.

    Example:
        >>> cos, sin = RotaryEmbedding(head_dim=64, rope_theta=1e6)(keras.ops.arange(5)[None])
        >>> cos.shape
        (1, 5, 32)

    References: Su et al., 2021, "RoFormer", arXiv:2104.09864, section 3.2; linear: Chen et al., 2023,
    arXiv:2306.15595; dynamic NTK and YaRN: Peng et al., 2023, "YaRN", arXiv:2309.00071, sections 3.1 to 3.4.
    """

    def __init__(self, head_dim, rope_theta=10000.0, rope_parameters=None, max_position_embeddings=32768, **kwargs):
        kwargs.setdefault("dtype", "float32")
        super().__init__(**kwargs)
        if head_dim % 2:
            raise ValueError(f"head_dim is {head_dim}; the rotary embedding turns pairs, so it must be even.")
        self.head_dim = head_dim
        rope = dict(rope_parameters or {})
        self.rope_parameters = normalise_rope(rope.pop("rope_theta", rope_theta), rope, None)
        self.max_position_embeddings = max_position_embeddings
        self.inverse_frequencies, self.attention_factor = _frequencies(
            head_dim, self.rope_parameters, max_position_embeddings
        )

    def call(self, position_ids):
        positions = ops.cast(position_ids, "float32")[..., None]
        if self.rope_parameters["rope_type"] == "dynamic":
            frequencies = self._dynamic_frequencies(positions)
        else:
            frequencies = ops.convert_to_tensor(self.inverse_frequencies, dtype="float32")
        angles = positions * frequencies
        return ops.cos(angles) * self.attention_factor, ops.sin(angles) * self.attention_factor

    def _dynamic_frequencies(self, positions):
        """Frequencies for the longest position of this call: beyond the original length the base grows with it."""
        original, factor = _original_length(self.rope_parameters, self.max_position_embeddings), self._factor
        length = ops.maximum(ops.max(positions) + 1.0, float(original))
        growth = (factor * length / original) - (factor - 1.0)
        base = self.rope_parameters["rope_theta"] * ops.power(growth, self.head_dim / (self.head_dim - 2))
        return ops.power(base, ops.convert_to_tensor(-_exponents(self.head_dim), dtype="float32"))

    @property
    def _factor(self):
        return float(self.rope_parameters["factor"])

    def compute_output_spec(self, position_ids):
        table = keras.KerasTensor((*position_ids.shape, self.head_dim // 2), dtype="float32")
        return table, keras.KerasTensor(table.shape, dtype="float32")

    def get_config(self):
        return {
            **super().get_config(),
            "head_dim": self.head_dim,
            "rope_parameters": self.rope_parameters,
            "max_position_embeddings": self.max_position_embeddings,
        }


def apply_rotary_embedding(x, cos, sin):
    """Turns each pair (x[i], x[i + head_dim / 2]) of a head by its position's angle.

    Args:
        x: tensor (batch, length, heads, head_dim).
        cos, sin: tensors (batch or 1, length, head_dim // 2).

    Returns:
        Tensor of x's shape and dtype.
    """
    cos, sin = (ops.expand_dims(ops.cast(table, x.dtype), 2) for table in (cos, sin))
    first, second = ops.split(x, 2, axis=-1)
    return ops.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _exponents(head_dim):
    return np.arange(0, head_dim, 2, dtype="float32") / np.float32(head_dim)


def _original_length(rope, max_position_embeddings):
    return rope.get("original_max_position_embeddings") or max_position_embeddings


def _frequencies(head_dim, rope, max_position_embeddings):
    """Inverse frequencies (head_dim // 2,) in float32 and the factor on cosines and sines of a rope type."""
    base, kind = np.float32(rope["rope_theta"]), rope["rope_type"]
    plain = np.float32(1.0) / base ** _exponents(head_dim)
    if kind == "linear":
        return plain / np.float32(rope["factor"]), 1.0
    if kind == "llama3":
        return _llama3(plain, rope), 1.0
    if kind == "yarn":
        return _yarn(plain, head_dim, rope, _original_length(rope, max_position_embeddings))
    return plain, 1.0


def _llama3(plain, rope):
    """Long wavelengths are stretched by the factor, short ones kept, those between blended."""
    wavelengths = 2 * np.pi / plain
    turns = rope["original_max_position_embeddings"] / wavelengths
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return ((1 - keep) * plain / rope["factor"] + keep * plain).astype("float32")


def _yarn(plain, head_dim, rope, original):
    """YaRN: interpolates the dimensions that turn less than beta_slow times in the original context."""
    factor = rope["factor"]

    def dimension(turns):
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

    low, high = dimension(rope.get("beta_fast", 32)), dimension(rope.get("beta_slow", 1))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high = high + 0.001 if low == high else high
    stretched = np.clip((np.arange(head_dim // 2, dtype="float32") - low) / (high - low), 0, 1)
    frequencies = plain / np.float32(factor) * stretched + plain * (1 - stretched)

    def mscale(weight):
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    attention_factor = rope.get("attention_factor")
    if attention_factor is None:
        if rope.get("mscale") and rope.get("mscale_all_dim"):
            attention_factor = mscale(rope["mscale"]) / mscale(rope["mscale_all_dim"])
        else:
            attention_factor = mscale(1)
    return frequencies.astype("float32"), float(attention_factor)
