"""What a model costs, from its config alone: the arithmetic of a token."""

from keras_qwen.config import QwenConfig
from keras_qwen.parameters import parameter_table


def matrix_weights(config: QwenConfig) -> int:
    """The weights that each token is multiplied with: all projections and the head, tied or not; no lookups, no norms.

    Args:
        config: the model's config.
    """
    table = parameter_table(config, head=not config.tie_word_embeddings)
    projections = sum(row.size for row in table if len(row.shape) == 2 and not row.path.startswith("embed_tokens"))
    return projections + (config.vocab_size * config.hidden_size if config.tie_word_embeddings else 0)


def flops_per_token(
    config: QwenConfig,
    length: int,
    *,
    training: bool = True,
    trained_weights: int | None = None,
    adapter_weights: int = 0,
) -> float:
    """Floating-point operations for a token, a multiply-add counted as two; what remat does again is not counted.

    A matrix of n weights costs 2 n forward, 2 n for the gradient of its input, and 2 n for its own gradient, if it is
    trained: 6 N for all N weights, 4 N + 6 A for adapters of A weights on a frozen base. Attention costs
    4 x heads x head_dim x keys in each layer, for scores and values, and twice that backward; the keys that a token
    sees are (length + 1) / 2 in the mean, or fewer with a sliding window.

    Args:
        config: the model's config.
        length: tokens of a row, or of a document where rows are packed.
        training: whether the backward pass is counted.
        trained_weights: those of the N that are trained; default all.
        adapter_weights: A, weights that adapters add.

    Returns:
        Operations for one token, norms, softmax and the like left out (about 1 %).

    Example:
        >>> flops_per_token(QwenConfig.from_pretrained("Qwen/Qwen2.5-0.5B"), 2048) / 1e9  # doctest: +SKIP
        3.1

    Reference: Chowdhery et al., 2022, "PaLM", arXiv:2204.02311, appendix B, with causal attention counted as it is.
    """
    weights = matrix_weights(config)
    trained = weights if trained_weights is None else trained_weights
    keys = sum(_mean_keys(length, config.window(i)) for i in range(config.num_hidden_layers))
    attention = 4 * config.num_attention_heads * config.head_dim * keys
    forward = 2 * (weights + adapter_weights) + attention
    if not training:
        return forward
    return 3 * attention + 4 * (weights + adapter_weights) + 2 * (trained + adapter_weights)


def _mean_keys(length, window):
    if window is None or window >= length:
        return (length + 1) / 2
    return (window * (window + 1) / 2 + (length - window) * window) / length
