"""The collectives of a compiled program, read from its text (XLA's HLO)."""

import dataclasses
import math
import re

import numpy as np

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "f64": 8}
_BYTES |= {"s64": 8, "u64": 8, "f8e4m3fn": 1, "f8e5m2": 1, "s4": 1, "u4": 1}
_KINDS = "all-gather all-reduce reduce-scatter all-to-all collective-permute".split()

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_OPERATION = re.compile(rf"= (.+?) ({'|'.join(_KINDS)})(-start)?\(")
_SHAPE = re.compile(r"\b([a-z]+\d*(?:e\dm\d\w*)?)\[([\d,]*)\]")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|branch_computations|called_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_EXPLICIT = re.compile(r"replica_groups=\{(\{[\d,{}]*\})\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? ?\{([^}]*)\}")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program.

    Attributes:
        kind: "all-gather", "all-reduce", "reduce-scatter", "all-to-all" or "collective-permute".
        axes: the mesh axes whose devices take part, or `()` where that cannot be told.
        received_bytes: what a device receives each time, by a ring: N (k - 1) / k of N bytes and k devices, twice that
            for an all-reduce.
        times: how often it runs in a step.
        counted: False if it is in a loop whose number of turns is not in the text, so that `times` is for one turn.
    """

    kind: str
    axes: tuple[str, ...]
    received_bytes: float
    times: int
    counted: bool

    def __post_init__(self):
        object.__setattr__(self, "axes", tuple(self.axes))


def read_collectives(text, mesh) -> list[Collective]:
    """All collectives of a compiled program.

    Args:
        text: `compiled.as_text()` of JAX.
        mesh: `{axis: size}` of the devices, in their order.
    """
    computations, entry = _computations(text)
    found = []

    def visit(name, times, counted, in_scatter):
        for line in computations.get(name, ()):
            if match := _OPERATION.search(line):
                one = _collective(match, line, mesh, in_scatter)
                if one is not None:
                    found.append(Collective(*one, times, counted))
            turns = _turns(line, computations) if " while(" in line else 1
            for group in _CALLED.findall(line):
                for called in re.findall(r"%?([\w.\-]+)", group):
                    if called in computations:
                        # TPU's compiler has no reduce-scatter, but an all-reduce and its slice in a function so named.
                        scatter = "all-reduce-scatter" in called
                        visit(called, times * (turns or 1), counted and turns is not None, scatter)

    visit(entry, 1, True, False)
    return found


def bytes_by_axis(collectives) -> dict[str, float]:
    """`{axis: bytes}` that a device receives in a step; several axes joined by "+"."""
    found = {}
    for one in collectives:
        name = "+".join(one.axes) or "?"
        found[name] = found.get(name, 0.0) + one.received_bytes * one.times
    return found


def _turns(line, computations):
    """How often a loop turns that counts from 0 to a constant; None where that cannot be told."""
    if match := _TRIPS.search(line):
        return int(match[1])
    condition, body = (computations.get(m[1]) if (m := re.search(rf"{name}=%?([\w.\-]+)", line)) else None
                       for name in ("condition", "body"))  # fmt: skip
    compared = condition and re.search(r"compare\(([^,]+), ([^)]+)\), direction=LT", condition[-1])
    if not compared or not body:
        return None
    end, counter = (_named(condition, name) for name in (compared[2], compared[1]))
    limit, index = re.search(r"constant\((\d+)\)", end), re.search(r"index=(\d+)", counter)
    if not limit or not index:
        return None
    root = re.search(r" tuple\((.*?)\)(?:,|$)", body[-1])
    values = re.sub(r"/\*.*?\*/", "", root[1]).split(", ") if root else []
    added = values and re.search(r" add\(([^)]+)\)", _named(body, values[int(index[1])]))
    steps = [re.search(r"constant\((\d+)\)", _named(body, name)) for name in added[1].split(", ")] if added else []
    step = next((int(found[1]) for found in steps if found), None)
    return None if step is None else -(-int(limit[1]) // step)


def _named(lines, name):
    """The operation of a name; "" if there is none."""
    start = "%" + name.strip().lstrip("%") + " ="
    return next((line for line in lines if start in line), "")


def _computations(text):
    computations, entry, lines = {}, None, None
    for line in text.splitlines():
        if lines is None:
            if (match := _COMPUTATION.match(line)) and "->" in line:
                lines = computations.setdefault(match[1], [])
                if line.startswith("ENTRY"):
                    entry = match[1]
        elif line == "}":  # within an operation, kernels have lines of their own
            lines = None
        else:
            lines.append(line)
    return computations, entry


def _collective(match, line, mesh, in_scatter):
    result, kind, start = match[1], match[2], match[3]
    sizes = [_nbytes(*shape) for shape in _SHAPE.findall(result)]
    if start:  # (operand, result, ...)
        sizes = [max(sizes)] if kind != "reduce-scatter" else [min(s for s in sizes if s > 4)]
    nbytes = sum(sizes)
    if kind == "collective-permute":
        return kind, _axes_of_pairs(line, mesh), float(nbytes)
    group = _group(line, mesh)
    count = len(group)
    if count < 2:
        return None
    if kind == "reduce-scatter":
        nbytes *= count
    if kind == "all-reduce" and in_scatter:
        kind = "reduce-scatter"
    share = (count - 1) / count
    return kind, _axes(group, mesh), nbytes * share * (2 if kind == "all-reduce" else 1)


def _nbytes(dtype, dimensions):
    return _BYTES.get(dtype, 0) * math.prod(int(d) for d in dimensions.split(",") if d)


def _numbers(text):
    return [int(number) for number in text.split(",") if number]


def _group(line, mesh):
    """The devices of the first group."""
    if match := _MESH.search(line):
        names, sizes = zip(*(part.split("=") for part in match[1].split(",")), strict=True)
        sizes = [int(size) for size in sizes]
        order = np.arange(math.prod(sizes))
        if match[2]:
            order = order.reshape(_numbers(match[2]))
            order = order.transpose(_numbers(match[3])) if match[3] else order
        chosen = [name.strip() for name in match[4].split(",")]
        index = tuple(slice(None) if name.strip() in chosen else 0 for name in names)
        return order.reshape(sizes)[index].ravel()
    if match := _IOTA.search(line):
        shape, dimensions = _numbers(match[1]), _numbers(match[2])
        order = np.arange(math.prod(dimensions)).reshape(dimensions)
        order = order.transpose(_numbers(match[3])) if match[3] else order
        return order.reshape(shape)[0].ravel()
    if match := _EXPLICIT.search(line):
        return np.array(_numbers(match[1].split("}")[0].strip("{")))
    return np.arange(math.prod(mesh.values()))


def _axes(devices, mesh):
    """The mesh axes along which some devices differ."""
    places = np.unravel_index(devices, tuple(mesh.values()))
    return tuple(axis for axis, place in zip(mesh, places, strict=True) if len(set(place.tolist())) > 1)


def _axes_of_pairs(line, mesh):
    match = re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", line)
    return _axes([int(match[1]), int(match[2])], mesh) if match else ()
