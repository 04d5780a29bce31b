"""The published Qwen2.5 models by name, so that planning needs no network."""

import re

from keras_qwen.config import QwenConfig

# hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads, vocab_size, tied, as in
# the config.json of Qwen/Qwen2.5-<size>-Instruct.
_SIZES = {
    "0.5B": (896, 4864, 24, 14, 2, 151_936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151_936, True),
    "3B": (2048, 11_008, 36, 16, 2, 151_936, True),
    "7B": (3584, 18_944, 28, 28, 4, 152_064, False),
    "14B": (5120, 13_824, 48, 40, 8, 152_064, False),
    "32B": (5120, 27_648, 64, 40, 8, 152_064, False),
    "72B": (8192, 29_568, 80, 64, 8, 152_064, False),
}
NAMES = tuple(f"Qwen2.5-{size}" for size in _SIZES)
"""From the smallest to the largest."""


def published(name) -> QwenConfig | None:
    """The config of a published model, None for a name that is not known.

    Args:
        name: e.g. `"Qwen2.5-32B"`, `"Qwen/Qwen2.5-32B-Instruct"`, `"Qwen2.5-Coder-7B"`.

    Example:
        >>> published("Qwen/Qwen2.5-7B-Instruct").hidden_size
        3584
    """
    match = re.fullmatch(r"(?:Qwen/)?Qwen2\.5-(?:Coder-)?(\d+(?:\.\d+)?B)(?:-Instruct)?", name)
    if match is None or match[1] not in _SIZES:
        return None
    hidden, intermediate, layers, heads, kv_heads, vocab, tied = _SIZES[match[1]]
    return QwenConfig(
        model_type="qwen2",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=32_768,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_word_embeddings=tied,
    )
