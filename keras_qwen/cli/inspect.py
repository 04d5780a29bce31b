"""`keras-qwen inspect`: what a checkpoint holds, and whether it is sound."""

import re
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from keras_qwen.checkpoint import hub
from keras_qwen.checkpoint.file_names import GENERATION_CONFIG_NAME, TOKENIZER_FILES
from keras_qwen.cli.diagnosis import check_finite, diagnose, read_json
from keras_qwen.cli.output import console, count, errors, size
from keras_qwen.tokenizer.files import chat_templates

_SHOWN_PROBLEMS = 10


def inspect(
    checkpoint: Annotated[str, typer.Argument(help="Folder or Hub id of a model, or of an adapter in PEFT's format.")],
    all_tensors: Annotated[bool, typer.Option("--all", help="List every tensor, not one line a kind.")] = False,
    finite: Annotated[
        bool, typer.Option("--check-finite", help="Read all values, too, and look for NaN and infinity.")
    ] = False,
    base: Annotated[Path | None, typer.Option(help="For an adapter: folder of the model it is for.")] = None,
):
    """Show what a checkpoint holds, and whether it is sound.

    Reads the headers of the files only, so that the largest model takes a second, and needs no backend. The exit status
    is 1 if something is missing, unknown, misshapen, truncated, or not loadable.
    """
    found = diagnose(fetch(checkpoint), base=base)
    if finite:
        with _reading() as progress:
            task = progress.add_task("Reading the values", total=found.nbytes)
            check_finite(found, lambda nbytes: progress.advance(task, nbytes))
    console.print(_summary(found))
    if found.tensors:
        console.print(_tensor_table(found, all_tensors))
    print_verdict(found, values="finite" if finite else "values not read (--check-finite does)")
    if found.problems:
        raise typer.Exit(1)


def fetch(source):
    """The folder of a checkpoint, model or adapter; fetched from the Hub if it is an id there."""
    try:
        return hub.resolve(source, "model")
    except OSError as problem:
        try:
            return hub.resolve(source, "adapter")
        except OSError:
            raise problem from None


def print_verdict(found, values=""):
    """Prints whether a `Diagnosis` is a good one, or all that is wrong and what to do.

    Args:
        found: the `Diagnosis`.
        values: what is known of the values.
    """
    for note in found.notes:
        console.print(Text.assemble(("Note: ", "yellow"), note))
    if not found.problems:
        text = f"{len(found.tensors)} tensors, all there and of the right shape{'; ' * bool(values)}{values}"
        console.print(Text.assemble(("ok", "bold green"), ": ", text), soft_wrap=True)
        return
    kinds = list(dict.fromkeys(problem.kind for problem in found.problems))
    for kind in kinds:
        problems = [problem for problem in found.problems if problem.kind == kind]
        console.print(Text.assemble((kind, "bold red"), f" ({len(problems)})"))
        for number, problem in enumerate(problems[:_SHOWN_PROBLEMS]):
            console.print(Text.assemble("  ", (problem.subject, "bold"), f": {problem.text}"), soft_wrap=True)
            following = problems[number + 1] if number + 1 < len(problems[:_SHOWN_PROBLEMS]) else None
            if following is None or following.remedy != problem.remedy:
                console.print(Text(f"    {problem.remedy}", "green"), soft_wrap=True)
        if len(problems) > _SHOWN_PROBLEMS:
            console.print(f"  ... and {len(problems) - _SHOWN_PROBLEMS} more")
    console.print(Text.assemble(("not sound", "bold red"), f": {', '.join(kinds)}"))


def _reading():
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    return Progress(*columns, TimeRemainingColumn(), console=errors)


def _summary(found):
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    for name, value in _facts(found):
        table.add_row(name, Text(value))
    return table


def _facts(found):
    yield "folder", str(found.folder)
    config, settings = found.config, found.settings
    if settings is not None:
        kind = "DoRA" if settings.use_dora else "rsLoRA" if settings.use_rslora else "LoRA"
        targets = settings.targets if isinstance(settings.targets, str) else ", ".join(settings.targets)
        yield "adapter", f"{kind}, rank {settings.rank}, alpha {settings.alpha:g}, dropout {settings.dropout:g}"
        yield "targets", targets
        yield "base model", str(settings.other.get("base_model_name_or_path") or "not named")
    elif config is not None:
        yield "model", f"{config.model_type}, {config.num_hidden_layers} layers, hidden_size {config.hidden_size}"
        yield (
            "attention",
            f"{config.num_attention_heads} heads, {config.num_key_value_heads} for keys and values, "
            f"head_dim {config.head_dim}{_windows(config)}",
        )
        yield "mlp", f"intermediate_size {config.intermediate_size}"
        tied = "head tied to the embeddings" if config.tie_word_embeddings else "head of its own"
        yield "vocabulary", f"{config.vocab_size} tokens, {tied}"
        rope = config.rope_parameters
        kind = "" if rope["rope_type"] == "default" else f", {rope['rope_type']} x {rope.get('factor')}"
        yield "context", f"{config.max_position_embeddings} tokens (rope_theta {rope['rope_theta']:.0f}{kind})"
    stored = f", {', '.join(found.dtypes)}" if found.dtypes else ""
    yield "weights", f"{count(found.size)} parameters, {size(found.nbytes)}{stored}, in {_files(found)}"
    if not found.is_adapter:
        yield "tokenizer", _tokenizer(found.folder)
        yield "generation", _generation(found.folder)


def _windows(config):
    windows = {config.window(i) for i in range(config.num_hidden_layers)} - {None}
    if not windows:
        return ""
    sliding = sum(config.window(i) is not None for i in range(config.num_hidden_layers))
    return f", a window of {max(windows)} tokens in {sliding} layers"


def _files(found):
    return "no file" if not found.files else next(iter(found.files)) if len(found.files) == 1 else (
        f"{len(found.files)} files"
    )  # fmt: skip


def _tokenizer(folder):
    files = {name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).is_file()}
    if "tokenizer.json" not in files and not {"vocab.json", "merges.txt"} <= files.keys():
        return "none: prompts have to be token ids; copy tokenizer.json and tokenizer_config.json of the model here"
    try:
        template = "with a chat template" if chat_templates(files).get("default") else "without a chat template"
    except ValueError as problem:
        return f"damaged: {problem}"
    return f"{', '.join(sorted(files))}, {template}"


def _generation(folder):
    settings = read_json(folder / GENERATION_CONFIG_NAME)
    shown = "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "eos_token_id"
    return ", ".join(f"{name} {settings[name]}" for name in shown if name in settings) or "no generation_config.json"


def _tensor_table(found, all_tensors):
    table = Table(box=None, header_style="bold", show_footer=True, footer_style="bold", padding=(0, 2, 0, 0))
    table.add_column("\ntensor", "all", overflow="fold")
    table.add_column("\ncount", str(len(found.tensors)), justify="right", no_wrap=True)
    table.add_column("\nshape", no_wrap=True)
    table.add_column("\ndtype", no_wrap=True)
    table.add_column("\nbytes", size(found.nbytes), justify="right", no_wrap=True)
    groups = {}
    for name, tensor in found.tensors.items():
        name = name.removeprefix("base_model.model.")  # PEFT's, the same for all
        kind = name if all_tensors else re.sub(r"\.\d+\.", ".*.", name)
        groups.setdefault((kind, tensor.shape, str(tensor.dtype)), []).append(tensor)
    parent = ""
    for (kind, shape, dtype), tensors in groups.items():
        above, star, below = kind.partition(".*.")
        if star and above != parent:
            table.add_row(Text(f"{above}.*"))
        parent = above if star else ""
        table.add_row(
            Text(f"  {below}" if star else kind),
            str(len(tensors)),
            " x ".join(map(str, shape)) or "scalar",
            dtype,
            size(sum(tensor.nbytes for tensor in tensors)),
        )
    return table
