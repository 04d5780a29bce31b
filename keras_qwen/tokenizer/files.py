"""The files a tokenizer is published in: what they say, and how they are written back unchanged."""

import json
import os
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from keras_qwen.checkpoint.file_names import TOKENIZER_FILES
from keras_qwen.tokenizer.byte_level import VOCABULARY_SIZE, byte_level_bpe, qwen_added_tokens

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")
_TOKEN_FLAGS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


def read_files(folder):
    """Read a folder's tokenizer files.

    Args:
        folder: path of the folder.

    Returns:
        Dict of file name to bytes, of those that exist.

    Raises:
        FileNotFoundError: neither tokenizer.json nor vocab.json with merges.txt is there.
    """
    folder = Path(folder)
    files = {name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).is_file()}
    if "tokenizer.json" not in files and not {"vocab.json", "merges.txt"} <= files.keys():
        raise FileNotFoundError(
            f"{folder} holds no tokenizer: put tokenizer.json there, or vocab.json and merges.txt "
            f"(found: {', '.join(files) or 'no tokenizer file'})"
        )
    return files


def write_files(folder, files):
    """Write a tokenizer's files, each of them whole or not at all, and remove those of another tokenizer.

    Args:
        folder: path of the folder; made if missing.
        files: dict of file name to bytes.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        unfinished = folder / f".{name}.{os.getpid()}"
        try:
            unfinished.write_bytes(content)
            unfinished.replace(folder / name)
        finally:
            unfinished.unlink(missing_ok=True)
    for name in set(TOKENIZER_FILES) - files.keys():  # a chat_template.jinja left behind would win over ours
        (folder / name).unlink(missing_ok=True)


def build_tokenizer(files):
    """Build the tokenizer that files describe.

    Args:
        files: dict of file name to bytes.

    Returns:
        A `tokenizers.Tokenizer` that neither pads nor truncates.

    Raises:
        ValueError: a file is not valid, or declares token ids that cannot be had; names the file.
    """
    if "tokenizer.json" in files:
        try:
            tokenizer = Tokenizer.from_buffer(files["tokenizer.json"])
        except ValueError as error:
            raise ValueError(f"tokenizer.json is not a tokenizer, fetch it again: {error}") from error
        # Some files carry the settings of their last use.
        tokenizer.no_padding()
        tokenizer.no_truncation()
    else:
        vocabulary = _read_json(files, "vocab.json")
        wrong = next((token for token, token_id in vocabulary.items() if not isinstance(token_id, int)), None)
        if wrong is not None:
            raise ValueError(f"vocab.json: the id of {wrong!r} is not an integer; fetch it again")
        tokenizer = byte_level_bpe(vocabulary, _read_merges(files, vocabulary))
    present = tokenizer.get_added_tokens_decoder()
    for token_id, token in sorted(_declared_tokens(files).items()):
        if token_id in present and present[token_id].content == token.content:
            continue
        tokenizer.add_tokens([token])
        if tokenizer.token_to_id(token.content) != token_id:
            raise ValueError(
                f"{token.content!r} is declared with id {token_id}, but the vocabulary gives it "
                f"{tokenizer.token_to_id(token.content)}: the files belong to different tokenizers; "
                "correct added_tokens_decoder in tokenizer_config.json (or added_tokens.json)"
            )
    return tokenizer


def special_tokens(files):
    """Return which token plays which part: a dict of `bos_token`, `eos_token`, `pad_token`, `unk_token` to str or None.

    Args:
        files: dict of file name to bytes.
    """
    declared = _read_json(files, "special_tokens_map.json") | _read_json(files, "tokenizer_config.json")
    # Qwen's own defaults, where the files are silent.
    defaults = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    values = {name: declared.get(name, defaults.get(name)) for name in SPECIAL_TOKEN_NAMES}
    return {name: value["content"] if isinstance(value, dict) else value for name, value in values.items()}


def chat_templates(files):
    """Return the chat templates by name; the usual one is called "default".

    Args:
        files: dict of file name to bytes.
    """
    if "chat_template.jinja" in files:
        return {"default": _read_text(files, "chat_template.jinja")}
    template = _read_json(files, "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}
    return {} if template is None else {"default": template}


def with_chat_template(files, template):
    """Return the files with another chat template, in the place where the old one was.

    Args:
        files: dict of file name to bytes.
        template: jinja text; None to have no template.
    """
    files, config = dict(files), _read_json(files, "tokenizer_config.json")
    in_config = "chat_template" in config
    config.pop("chat_template", None)
    if template is not None and "chat_template.jinja" in files:
        files["chat_template.jinja"] = template.encode("utf-8")
    else:
        files.pop("chat_template.jinja", None)
        in_config = True
    if in_config:
        if template is not None:
            config["chat_template"] = template
        files["tokenizer_config.json"] = _to_json(config)
    return files


def new_files(tokenizer, special_tokens, chat_template):
    """Return the files of a tokenizer that was not read from any: dict of file name to bytes.

    Args:
        tokenizer: a `tokenizers.Tokenizer`.
        special_tokens: dict of `bos_token` and so on to str or None.
        chat_template: jinja text, or None.
    """
    added = {
        str(token_id): {flag: getattr(token, flag) for flag in _TOKEN_FLAGS}
        for token_id, token in sorted(tokenizer.get_added_tokens_decoder().items())
    }
    config = {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": added, **special_tokens}
    if chat_template is not None:
        config["chat_template"] = chat_template
    return {
        "tokenizer.json": tokenizer.to_str(pretty=True).encode("utf-8"),
        "tokenizer_config.json": _to_json(config),
    }


def _to_json(value):
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode("utf-8")


def _read_text(files, name):
    try:
        return files[name].decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text, fetch it again: {error}") from error


def _read_json(files, name):
    if name not in files:
        return {}
    try:
        value = json.loads(files[name])
    except ValueError as error:
        raise ValueError(f"{name} is not valid JSON, fetch it again: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{name} must hold a JSON object, not a {type(value).__name__}")
    return value


def _read_merges(files, vocabulary):
    lines = _read_text(files, "merges.txt").split("\n")
    merges = [tuple(line.split(" ")) for line in lines if line.strip() and not line.startswith("#version")]
    wrong = next((merge for merge in merges if len(merge) != 2), None)
    if wrong is not None:
        raise ValueError(f"merges.txt: {' '.join(wrong)!r} is not two tokens with a space between; fetch it again")
    unknown = next((merge for merge in merges if not vocabulary.keys() >= {*merge, "".join(merge)}), None)
    if unknown is not None:
        raise ValueError(f"merges.txt merges {unknown}, which vocab.json lacks: they belong to different tokenizers")
    return merges


def _declared_tokens(files):
    """Return the added tokens by id, as the newest of the files that declare them says."""
    config = _read_json(files, "tokenizer_config.json")
    if config.get("added_tokens_decoder"):
        return {
            int(token_id): AddedToken(**{flag: entry[flag] for flag in _TOKEN_FLAGS if flag in entry})
            for token_id, entry in config["added_tokens_decoder"].items()
        }
    if "added_tokens.json" in files:
        described = _read_json(files, "special_tokens_map.json") | config
        special = {*special_tokens(files).values(), *described.get("additional_special_tokens", ())}
        return {
            token_id: AddedToken(token, special=token in special, normalized=token not in special)
            for token, token_id in _read_json(files, "added_tokens.json").items()
        }
    if "tokenizer.json" in files:
        return {}
    if len(_read_json(files, "vocab.json")) != VOCABULARY_SIZE:
        raise ValueError(
            f"vocab.json is not Qwen's of {VOCABULARY_SIZE} tokens, and nothing says which special tokens it has: "
            "add added_tokens_decoder to tokenizer_config.json"
        )
    return dict(enumerate(qwen_added_tokens(), start=VOCABULARY_SIZE))
