"""What lies where: a table of a model's variables, their layouts and bytes on each device."""

import dataclasses
import math

import keras

from keras_qwen import keras_private
from keras_qwen.distribution.layouts import local_size


@dataclasses.dataclass(frozen=True)
class Row:
    """One variable.

    Attributes:
        path, shape, dtype: of the variable.
        layout: for each dimension, the mesh axis or axes that split it, None for none.
        device_bytes: on each device.
        copies: devices that hold the same part.
        note: why it is not split as its kind usually is, or "".
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    layout: tuple
    device_bytes: int
    copies: int
    note: str


@dataclasses.dataclass(frozen=True)
class Report:
    """What `report` returns; prints as a table.

    Attributes:
        rows: a `Row` for each variable.
        devices: number of devices of the mesh.
    """

    rows: tuple[Row, ...]
    devices: int

    @property
    def device_bytes(self) -> int:
        """Bytes of all variables on each device."""
        return sum(row.device_bytes for row in self.rows)

    @property
    def replicated_share(self) -> float:
        """The share of a device's bytes that another device holds, too."""
        return sum(row.device_bytes for row in self.rows if row.copies > 1) / max(self.device_bytes, 1)

    def __str__(self):
        lines = [f"{'variable':52} {'shape':>18} {'dtype':>9} {'on a device':>12} {'copies':>6}  layout"]
        for row in self.rows:
            layout = ", ".join("-" if axes is None else str(axes) for axes in row.layout) or "-"
            note = f"  ({row.note})" if row.note else ""
            lines.append(
                f"{row.path:52} {row.shape!s:>18} {row.dtype:>9} {_size(row.device_bytes):>12} {row.copies:6}  "
                f"{layout}{note}"
            )
        lines.append(
            f"{len(self.rows)} variables on {self.devices} devices: {_size(self.device_bytes)} on each, "
            f"{self.replicated_share:.1%} of them on others, too"
        )
        return "\n".join(lines)


def _size(number):
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.4g} {unit}"
        number /= 1024
    return f"{number:,.2f} GiB"


def report(model, *, optimizer=False) -> Report:
    """How the variables of a model lie on the mesh it was made for.

    Args:
        model: a model made under a distribution; without one, all lies on one device.
        optimizer: whether to list the state of its optimizer, too, as far as it is built.

    Returns:
        A `Report`; `print(report(model))` shows the table.

    Example:
        >>> print(kq.distribution.report(model))
        >>> kq.distribution.report(model).device_bytes / 1e9
    """
    variables = [*model.weights, *(model.optimizer.variables if optimizer and model.optimizer else [])]
    distribution = keras.distribution.distribution()
    devices = 1 if distribution is None else math.prod(distribution.device_mesh.shape)
    layouts = getattr(distribution, "layouts", None)
    rows = []
    for variable in variables:
        shape, layout = tuple(variable.shape), keras_private.layout_of(variable)
        size = math.prod(shape) if layout is None else local_size(layout, shape)
        pattern = None if layouts is None else layouts.pattern_of(variable.path)
        dtype = keras.backend.standardize_dtype(variable.dtype)
        rows.append(
            Row(
                path=variable.path,
                shape=shape,
                dtype=dtype,
                layout=(None,) * len(shape) if layout is None else tuple(layout.axes),
                device_bytes=size * dtype_bytes(dtype),
                copies=devices * size // max(math.prod(shape), 1),
                note="" if pattern is None else layouts.notes.get(pattern, ""),
            )
        )
    return Report(tuple(rows), devices)


def dtype_bytes(dtype) -> int:
    """Bytes of an element."""
    return {"bool": 1}.get(dtype) or int("".join(c for c in dtype if c.isdigit())) // 8
