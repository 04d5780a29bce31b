"""report: a training run on one page."""

import io
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

_STYLES = (("#1f4e79", "-"), ("#c55a11", "--"), ("#548235", ":"))  # lines that coincide are both seen
# Title, unit, and the names in a history with their labels.
_PANELS = (
    ("Loss", "nats a token", {"loss": "training", "val_loss": "validation"}),
    ("Accuracy", "share of tokens", {"token_accuracy": "training", "val_token_accuracy": "validation"}),
    ("Gradient norm", "", {"gradient_norm": "all weights"}),
    ("Learning rate", "", {"learning_rate": "learning rate"}),
    ("Memory", "GB", {"memory_in_use_gb": "in use", "memory_peak_gb": "peak", "memory_limit_gb": "limit"}),
    (
        "Throughput",
        "tokens a second",
        {"tokens_per_second": "all tokens", "trained_tokens_per_second": "trained tokens"},
    ),
)


class Page(Figure):
    """A figure that a notebook shows, also where pyplot, which sees to it otherwise, is not used."""

    def _repr_png_(self):
        file = io.BytesIO()
        self.savefig(file, format="png", dpi=100)
        return file.getvalue()


def report(history, path=None):
    """Draws what a history holds of loss, accuracy, gradient norm, learning rate, memory and throughput.

    What the callbacks have not written is left out. With `GradientNorm`, the blocks are drawn behind the total.

    Args:
        history: what `fit` returns, or its `history` dict.
        path: a .png (or .pdf, .svg) file to write; None: none.

    Returns:
        A matplotlib `Figure`; a notebook shows it.

    Raises:
        ValueError: if the history holds nothing to draw.
        OSError: if the file cannot be written.

    Example:
        >>> history = model.fit(dataset, callbacks=[kq.callbacks.DeviceMemory(), kq.callbacks.Throughput()])
        >>> kq.callbacks.report(history, "run.png")
    """
    values = getattr(history, "history", history)
    panels = [
        (title, unit, {name: label for name, label in names.items() if len(values.get(name, ()))})
        for title, unit, names in _PANELS
    ]
    panels = [panel for panel in panels if panel[2]]
    if not panels:
        raise ValueError(f"The history holds none of loss, memory, ...; it has {sorted(values) or 'nothing'}.")
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Page(figsize=(4.4 * columns, 3.1 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis, (title, unit, names) in zip(axes, panels, strict=False):
        _draw(axis, title, unit, names, values)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    if path is not None:
        figure.savefig(Path(path), dpi=130)
    return figure


def _draw(axis, title, unit, names, values):
    if title == "Gradient norm":
        blocks = [name for name in values if name.startswith("gradient_norm/")]
        for i, name in enumerate(blocks):
            _line(axis, values[name], color="0.75", linewidth=0.8, label="blocks" if i == 0 else None)
    longest = 0
    for (colour, line), (name, label) in zip(_STYLES, names.items(), strict=False):
        _line(axis, values[name], color=colour, linestyle=line, label=label, marker="" if line == ":" else "o")
        longest = max(longest, len(values[name]))
    axis.set_title(title, loc="left", fontweight="bold")
    axis.set_ylabel(unit)
    axis.set_xlabel("epoch")
    axis.set_xlim(0.5, longest + 0.5)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    if title in ("Accuracy", "Memory", "Throughput"):
        axis.set_ylim(bottom=0)
    if len(axis.lines) > 1:
        axis.legend(frameon=False, fontsize=8)


def _line(axis, numbers, **style):
    style.setdefault("markersize", 3)
    axis.plot(np.arange(1, len(numbers) + 1), np.asarray(numbers, "float64"), **style)
