"""`keras-qwen plan`: will it fit?"""

from typing import Annotated

import typer

from keras_qwen.cli.output import console


def plan(
    model: Annotated[str, typer.Argument(help="Hub id, folder, or a published name such as Qwen2.5-32B.")],
    mesh: Annotated[str, typer.Option(help="Axes and sizes, e.g. data=2,model=8; default: one device.")] = "",
    batch_size: Annotated[int, typer.Option(help="Rows of a step, on all devices together.")] = 1,
    sequence_length: Annotated[int, typer.Option(help="Tokens of a row.")] = 2048,
    dtype: Annotated[str, typer.Option(help="Dtype policy.")] = "mixed_bfloat16",
    remat: Annotated[str, typer.Option(help="none, block, attention, mlp, or n for every n-th block.")] = "block",
    optimizer: Annotated[str, typer.Option(help="adamw, adamw-bfloat16, adamw-int8, adam, lion or sgd.")] = "adamw",
    lora_rank: Annotated[int | None, typer.Option(help="Rank of an adapter; default: full training.")] = None,
    quantization: Annotated[str | None, typer.Option(help="int8, int4 or nf4, with --lora-rank.")] = None,
    micro_batch_size: Annotated[int | None, typer.Option(help="Rows that are computed at once.")] = None,
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="Split the length over model.")
    ] = False,
    shard_optimizer: Annotated[bool, typer.Option("--shard-optimizer", help="Split moments over data.")] = False,
    memory: Annotated[str | None, typer.Option(help="Of a device: 80GB, '24 GiB', or its name, e.g. H100.")] = None,
    suggest: Annotated[int | None, typer.Option(help="Rank what fits on so many devices; needs --memory.")] = None,
    topology: Annotated[
        str | None, typer.Option(help="Compile the step, too: cpu, or a TPU topology such as v5p:2x2x4.")
    ] = None,
    plot: Annotated[str | None, typer.Option(help="Write a picture to this PNG file.")] = None,
):
    """Say what each device will hold in a training step, whether it fits, and what would.

    Needs no weights and no accelerator. The exit status is 1 if it does not fit into --memory.
    """
    import keras_qwen as kq

    config = _config(model)
    if suggest is not None:
        if memory is None:
            raise ValueError("--suggest needs --memory.")
        found = kq.suggest(
            config,
            devices=suggest,
            device_memory=memory,
            batch_size=batch_size,
            sequence_length=sequence_length,
            dtype=dtype,
            optimizer=optimizer,
        )
        console.print(str(found), highlight=False, soft_wrap=True)
        raise typer.Exit(0 if found else 1)
    planned = kq.plan(
        config,
        mesh=parse_mesh(mesh),
        batch_size=batch_size,
        sequence_length=sequence_length,
        dtype=dtype,
        remat=None if remat == "none" else int(remat) if remat.isdigit() else remat,
        optimizer=optimizer,
        lora_rank=lora_rank,
        quantization=quantization,
        micro_batch_size=micro_batch_size,
        sequence_parallel=sequence_parallel,
        shard_optimizer=shard_optimizer,
        device_memory=memory,
    )
    console.print(str(planned), highlight=False, soft_wrap=True)
    if planned.fits is not None:
        for what in ("batch_size", "sequence_length", "model"):
            if what != "batch_size" or micro_batch_size is None:
                console.print(f"  largest {what.replace('_', ' ')}: {planned.largest(what)}", highlight=False)
    if plot is not None:
        planned.plot(plot)
        console.print(f"  drawn: {plot}", highlight=False)
    if topology is not None:
        console.print("compiling, which may take minutes ...")
        console.print(str(planned.compile(topology)), highlight=False, soft_wrap=True)
    if planned.fits is False:
        raise typer.Exit(1)


def parse_mesh(text) -> dict[str, int]:
    """`"data=2,model=8"` as a dict; `""` is one device.

    Raises:
        ValueError: for anything else, saying how a mesh is written.
    """
    mesh = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        axis, _, size = part.partition("=")
        if not size.strip().lstrip("-").isdigit() or axis.strip() in mesh:
            raise ValueError(f"--mesh {text!r} is not understood; write e.g. data=2,fsdp=2,model=4.")
        mesh[axis.strip()] = int(size)
    return mesh


def _config(model):
    import keras_qwen as kq
    from keras_qwen.planner.published import published

    return published(model) or kq.QwenConfig.from_pretrained(model)
