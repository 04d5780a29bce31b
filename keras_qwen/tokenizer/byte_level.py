"""Qwen's byte-level BPE: how text is cut before merging, and which tokens are added after the vocabulary."""

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

# A piece never crosses what separates these alternatives: contractions, words, single digits, punctuation, newlines,
# spaces.  Part of the vocabulary's definition (Qwen2, github.com/QwenLM/Qwen): other pieces give other token ids.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)
VOCABULARY_SIZE = 151643
_SPECIAL_NAMES = (
    "endoftext im_start im_end object_ref_start object_ref_end box_start box_end quad_start quad_end "
    "vision_start vision_end vision_pad image_pad video_pad"
)
_CODE_NAMES = "fim_prefix fim_middle fim_suffix fim_pad repo_name file_sep"


def qwen_added_tokens():
    """Return the tokens that Qwen2.5 adds to the 151,643 of vocab.json, in order: the first one's id is 151643."""

    def named(names, template="<|{}|>", special=True):
        return [AddedToken(template.format(n), special=special, normalized=False) for n in names.split()]

    return named(_SPECIAL_NAMES) + named("tool_call /tool_call", "<{}>", special=False) + named(_CODE_NAMES)


def byte_level_bpe(vocabulary=None, merges=None):
    """Build a tokenizer that cuts and decodes text as Qwen's do.

    Args:
        vocabulary: dict of token to id; empty by default, to be trained.
        merges: list of pairs of tokens, most frequent first.

    Returns:
        A `tokenizers.Tokenizer` without added tokens.

    Example:
        >>> byte_level_bpe({"H": 0, "i": 1, "Hi": 2}, [("H", "i")]).encode("Hi").ids
        [2]
    """
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary or {}, merges=merges or []))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def train_byte_level_bpe(texts, vocab_size, special_tokens):
    """Train a vocabulary on texts; every byte is in it, so that every text can be encoded.

    Args:
        texts: iterable of str.
        vocab_size: ids to make at most, special tokens included; short texts give fewer.
        special_tokens: list of str; they take the last ids, as in Qwen's checkpoints.

    Returns:
        A `tokenizers.Tokenizer`.

    Raises:
        ValueError: vocab_size leaves no room for the 256 bytes and the special tokens.

    Example:
        >>> train_byte_level_bpe(["low lower lowest"], 260, ["<|endoftext|>"]).token_to_id("<|endoftext|>")
        259
    """
    smallest = 256 + len(special_tokens)
    if vocab_size < smallest:
        raise ValueError(f"vocab_size={vocab_size} is too small: 256 bytes and the special tokens take {smallest}")
    tokenizer = byte_level_bpe()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special_tokens])
    return tokenizer
