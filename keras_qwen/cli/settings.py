"""From a YAML file and flags to checked settings: unknown keys, wrong types and the nearest right name."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from pathlib import Path

import yaml


def setting(default, help, **options):
    """A field of a settings dataclass, with the text that `--help` shows."""
    if isinstance(default, type):
        return dataclasses.field(default_factory=default, metadata={"help": help}, **options)
    return dataclasses.field(default=default, metadata={"help": help}, **options)


def leaves(kind, prefix=""):
    """{dotted name: field} of all settings below a dataclass, sections opened up."""
    found = {}
    for field in dataclasses.fields(kind):
        section = section_of(kind, field.name)
        if section is None:
            found[prefix + field.name] = field
        else:
            found |= leaves(section, f"{prefix}{field.name}.")
    return found


def section_of(kind, name):
    """The dataclass of a section, also of one that may be left out; None for a plain setting."""
    hint = typing.get_type_hints(kind)[name]
    return next((h for h in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(h)), None)


def read_yaml(path):
    """The settings of a YAML file, as it says them.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is not YAML, or no mapping; names the file and the place.
    """
    path = Path(path)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as problem:
        raise OSError(f"There is no settings file {path}.") from problem
    except yaml.MarkedYAMLError as problem:
        line = "" if problem.problem_mark is None else f", line {problem.problem_mark.line + 1}"
        raise ValueError(f"{path}{line}: not valid YAML, {problem.problem}. Are all texts quoted?") from problem
    except (yaml.YAMLError, UnicodeDecodeError) as problem:
        raise ValueError(f"{path} is not valid YAML: {problem}") from problem
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} must hold settings, one `name: value` a line, not a {type(content).__name__}.")
    return dict(content)


def merged(content, flags):
    """The content of a file with flags, {dotted name: value}, put over it."""
    content = {name: dict(value) if isinstance(value, Mapping) else value for name, value in content.items()}
    for name, value in flags.items():
        section, _, key = name.rpartition(".")
        if section and not isinstance(content.get(section), dict):
            content[section] = {}
        (content[section] if section else content)[key] = value
    return content


def build(kind, content, where, prefix="", root=None):
    """An instance of a settings dataclass.

    Args:
        kind: the dataclass.
        content: {name: value}, sections being dicts.
        where: what messages call the place that the content comes from.

    Raises:
        ValueError: for an unknown name, naming the nearest; for a missing or wrong value.
    """
    root = root or kind
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for name in content:
        if name not in fields:
            raise ValueError(f"{where}: there is no setting {prefix}{name}. {_nearest(f'{prefix}{name}', root)}")
    values = {}
    for name, value in content.items():
        section, full = section_of(kind, name), prefix + name
        if section is None:
            values[name] = _convert(value, typing.get_type_hints(kind)[name], full, where)
        elif isinstance(value, Mapping):
            values[name] = build(section, value, where, f"{full}.", root)
        elif value is not None:
            raise ValueError(f"{where}: {full} is a section; write {', '.join(leaves(section, full + '.'))}.")
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in values:
            raise ValueError(f"{where}: {prefix}{name} is missing ({field.metadata['help']})")
    return kind(**values)


def _nearest(name, root):
    known = list(leaves(root))
    last = name.rpartition(".")[2]
    inside = [path for path in known if path.rpartition(".")[2] == last]
    near = inside or difflib.get_close_matches(name, known, 1) or [
        path for path in known if path.rpartition(".")[2] in difflib.get_close_matches(
            last, [path.rpartition(".")[2] for path in known], 1
        )
    ]  # fmt: skip
    return f"Did you mean {near[0]}?" if near else f"There are {', '.join(known)}."


def _convert(value, hint, name, where):
    """A value of YAML or of a flag in the setting's type; 2e-4, which YAML takes for a text, becomes a number."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if types.NoneType in options and (value is None or value in ("none", "null")):
        return None
    for option in options:
        if option is bool:
            if isinstance(value, bool) or value in ("true", "false"):
                return value in (True, "true")
        elif option in (int, float):
            if not isinstance(value, bool):
                try:
                    number = option(value)
                except (TypeError, ValueError, OverflowError):
                    continue
                if number == value or isinstance(value, str):
                    return number
        elif option is str:
            if isinstance(value, str):
                return value
        else:
            origin = typing.get_origin(option) or option
            parsed = _parsed(value) if isinstance(value, str) and value[:1] in ("[", "{") else value
            if isinstance(parsed, origin) and not isinstance(parsed, str):
                return parsed
    wanted = " or ".join("none" if o is types.NoneType else getattr(o, "__name__", str(o)) for o in options)
    raise ValueError(f"{where}: {name} is {value!r}; it must be {wanted}.")


def _parsed(text):
    """A flag's list or mapping; the text itself if it is none (a regular expression, say)."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def to_yaml(settings):
    """The text of a YAML file with all settings."""
    return yaml.safe_dump(dataclasses.asdict(settings), sort_keys=False, allow_unicode=True)
