"""Plans as a picture."""

from keras_qwen.memory_estimate import CATEGORIES
from keras_qwen.planner.tables import title


def draw(plans, path=None, labels=None):
    """Stacked bars, one for each plan, beside what their devices have.

    Args:
        plans: `MemoryPlan`s.
        path: where to write a PNG, too; None for nowhere.
        labels: of the bars; default, what each plan is for.

    Returns:
        The matplotlib figure.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 1.6 + 0.55 * len(plans)), layout="constrained")
    ax = figure.subplots()
    labels = labels or [title(plan.setup).replace(": ", ":\n") for plan in plans]
    lefts = [0.0] * len(plans)
    for number, category in enumerate(CATEGORIES):
        widths = [plan.categories[category] / 1e9 for plan in plans]
        ax.barh(range(len(plans)), widths, left=lefts, color=f"C{number}", label=category.replace("_", " "))
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    for row, (plan, right) in enumerate(zip(plans, lefts, strict=True)):
        ax.text(right, row, f" {right:,.1f}", va="center")
        if plan.usable_bytes:
            ax.plot([plan.usable_bytes / 1e9] * 2, [row - 0.45, row + 0.45], color="black", lw=2)
    ax.set_yticks(range(len(plans)), labels)
    ax.invert_yaxis()
    ax.margins(x=0.1)
    ax.set_xlabel("GB on each device; black: what it can use")
    ax.legend(fontsize="small", ncols=4, loc="lower center", bbox_to_anchor=(0.4, 1.0), frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
    if path is not None:
        figure.savefig(path, dpi=110)
    return figure
