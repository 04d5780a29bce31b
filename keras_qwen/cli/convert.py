"""`keras-qwen convert`: a checkpoint with another dtype, other files, or its adapter merged."""

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from keras_qwen.checkpoint import hub
from keras_qwen.checkpoint.safetensors_files import DTYPES
from keras_qwen.cli.diagnosis import diagnose, is_checkpoint
from keras_qwen.cli.inspect import print_verdict
from keras_qwen.cli.loading import adapter_base, load_model
from keras_qwen.cli.options import BackendOption
from keras_qwen.cli.output import console, size, step

_DTYPES = tuple(str(dtype) for dtype in DTYPES.values())


def convert(
    source: Annotated[
        str, typer.Argument(help="Folder or Hub id of a model; or of an adapter, to merge it with its base model.")
    ],
    output: Annotated[Path, typer.Argument(help="Folder for the result.")],
    adapter: Annotated[str | None, typer.Option(help="Folder or Hub id of an adapter to merge.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help=f"{', '.join(_DTYPES)}; default: as the source's tensors are.")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Size of a file at most, such as 500MB.")] = "5GB",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint that is in OUTPUT.")] = False,
    backend: BackendOption = None,
):
    """Write a checkpoint anew: another dtype, other file sizes, or with its adapter merged.

    The result is in Hugging Face's form and is inspected at the end; until it is complete, OUTPUT stays as it was.
    """
    base = adapter_base(source)
    if base is not None and adapter is not None:
        raise ValueError(f"{source} is an adapter itself: pass its base model, or leave out --adapter {adapter}.")
    source, adapter = (source, adapter) if base is None else (base, source)
    if dtype is not None and dtype not in _DTYPES:
        raise ValueError(f"dtype={dtype!r} cannot be saved; known are {', '.join(_DTYPES)}.")
    _check_output(output, overwrite)
    folder = hub.resolve(source, "model")
    if output.exists() and output.resolve() == folder.resolve():
        raise ValueError(f"{output} is the source itself: choose another folder.")
    found = diagnose(folder)
    if found.problems:
        print_verdict(found)
        raise typer.Exit(1)
    # Sums of base and adapter are rounded once, at the end; without an adapter, the values stay what they are.
    exact = found.dtypes[0] if adapter is None and len(found.dtypes) == 1 else "float32"
    with step(f"Loading {source}", spinner=False):
        model = load_model(folder, backend=backend, adapter=adapter, dtype=exact)
    if adapter is not None:
        with step(f"Merging {adapter}"):
            model.merge_adapter(keep_base=False)
    with step(f"Writing {output}"):
        model.save_pretrained(output, max_shard_size=max_shard_size, dtype=dtype)
    result = diagnose(output)
    before, after = ((size(d.nbytes), ", ".join(d.dtypes), f"{len(d.files)} files") for d in (found, result))
    console.print(Text(f"{source}: {', '.join(before)} -> {output}: {', '.join(after)}"), soft_wrap=True)
    print_verdict(result)
    if result.problems:
        raise typer.Exit(1)


def _check_output(output, overwrite):
    if output.exists() and not output.is_dir():
        raise ValueError(f"{output} is a file; a checkpoint is a folder.")
    if not output.exists() or not any(output.iterdir()):
        return
    if not is_checkpoint(output):
        raise ValueError(f"{output} holds files, but no checkpoint: choose another folder, or empty it.")
    if not overwrite:
        raise ValueError(f"{output} holds a checkpoint: choose another folder, or pass --overwrite.")
