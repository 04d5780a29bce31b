"""Options that several commands have, under the names of the Python arguments."""

import enum
from typing import Annotated

import typer


class Backend(enum.StrEnum):
    """What Keras can run on."""

    tensorflow = "tensorflow"
    jax = "jax"
    torch = "torch"


BackendOption = Annotated[
    Backend | None, typer.Option(help="What Keras runs on; default: KERAS_BACKEND, or Keras's settings file.")
]
AdapterOption = Annotated[str | None, typer.Option(help="Folder or Hub id of an adapter (LoRA) for the model.")]
DtypeOption = Annotated[
    str | None,
    typer.Option(help="dtype policy to compute with: float32 (the default), bfloat16, mixed_bfloat16, ..."),
]
QuantizationOption = Annotated[
    str | None, typer.Option(help="Quantise the projections while loading: int8, int4 or nf4.")
]
