"""`keras-qwen finetune`: train a model or an adapter, as a YAML file and flags say."""

import inspect
import typing
from pathlib import Path

import typer

from keras_qwen.cli.finetune_settings import Settings
from keras_qwen.cli.options import BackendOption
from keras_qwen.cli.settings import build, leaves, merged, read_yaml, section_of


def finetune(
    config: typing.Annotated[
        Path | None, typer.Argument(help="YAML file of settings, under the names of the flags: `lora: {rank: 16}`.")
    ] = None,
    backend: BackendOption = None,
    **flags,
):
    """Train a model or an adapter: on answers of chats, on raw text, or on pairs of answers.

    What a flag says goes before what the file says. Run again after a kill, the same command goes on where it was. In
    the output folder are then: settings.yaml, history.csv, report.png, checkpoint/, and model/ or adapter/.
    """
    given = {_path(name): value for name, value in flags.items() if value is not None}
    content = {} if config is None else read_yaml(config)
    where = "flags" if config is None else str(config)
    settings = build(Settings, merged(content, given), where).resolved()
    from keras_qwen.cli.training_run import run  # late: it needs Keras

    run(settings, backend)


def _path(parameter):
    return parameter.replace("__", ".")


def _with_flags(command):
    """Gives the command an option for each setting, so that `--help` shows them and a wrong one is an error."""
    parameters = list(inspect.signature(command).parameters.values())[:-1]
    for path, field in leaves(Settings).items():
        section, _, name = path.rpartition(".")
        option = typer.Option(
            f"--{path.replace('_', '-')}",
            help=_help(field),
            rich_help_panel=section or "settings",
            metavar=_metavar(section_of(Settings, section) if section else Settings, name),
            show_default=False,
        )
        parameters.append(
            inspect.Parameter(
                path.replace(".", "__"),
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=typing.Annotated[str | None, option],
            )
        )
    parameters[:2] = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters[:2]]
    command.__signature__ = inspect.Signature(parameters)
    return command


def _help(field):
    """The setting's text with its default, where the text does not say it."""
    text, default = field.metadata["help"], field.default
    if default in (inspect._empty, None) or "default:" in text or not isinstance(default, str | int | float):
        return text
    return f"{text} (default: {str(default).lower() if isinstance(default, bool) else default})"


def _metavar(kind, name):
    hint = typing.get_type_hints(kind)[name]
    names = [getattr(h, "__name__", str(h)) for h in typing.get_args(hint) or (hint,)]
    return "|".join(n for n in names if n != "NoneType")


finetune = _with_flags(finetune)
