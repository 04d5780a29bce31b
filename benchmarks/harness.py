"""Runs a case: every contestant at every point in a process of its own, in turn; table, JSON and picture."""

import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).parent / "results"
# name -> (environment's folder, KERAS_BACKEND)
CONTESTANTS = {
    "ours on jax": (".venv", "jax"),
    "ours on tensorflow": (".venv", "tensorflow"),
    "keras_hub on jax": (".venv", "jax"),
    "keras_hub on tensorflow": (".venv", "tensorflow"),
    "plain keras on jax": (".venv", "jax"),
    "scan_blocks on jax": (".venv", "jax"),
    "micro-batch 1 on jax": (".venv", "jax"),
    "micro-batch 1 on tensorflow": (".venv", "tensorflow"),
    "dense on jax": (".venv", "jax"),
    "dense on tensorflow": (".venv", "tensorflow"),
    "plain keras on tensorflow": (".venv", "tensorflow"),
    "transformers": (".venv-parity", "torch"),
}
PACKAGES = ("keras", "jax", "tensorflow", "keras-hub", "numpy")


def run_case(name, case, *, rounds=1, only=None, points=None):
    """Measures a case.

    Args:
        name: of the case.
        case: its module: `CONTESTANTS`, `POINTS`, `X`, `PANELS`, and `run(who, point) -> {metric: number}`.
        rounds: how often each process is started; the median counts.
        only: contestants whose names contain one of these words; None for all.
        points: indices of the points to measure; None for all.

    Returns:
        The document that is written: versions, machine, and for each contestant and point its metrics.
    """
    chosen = [who for who in case.CONTESTANTS if not only or any(word in who for word in only)]
    rows = []
    for number, point in enumerate(case.POINTS):
        if points is not None and number not in points:
            continue
        found = {who: [] for who in chosen}
        for _ in range(rounds):
            for who in chosen:
                metrics = _in_a_process(name, who, number)
                print(f"{who:26} {point} {metrics}", flush=True)
                found[who].append(metrics)
        for who, runs in found.items():
            medians = {key: _median([run[key] for run in runs]) for key in runs[0]}
            rows.append({"who": who, "point": point, **medians})
    return {
        "case": name,
        "what": case.__doc__.strip().splitlines()[0],
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": {p: importlib.metadata.version(p) for p in PACKAGES},
        "rows": rows,
    }


def _in_a_process(name, who, number):
    folder, backend = CONTESTANTS[who]
    python = ROOT / folder / "bin" / "python"
    if not python.exists():
        sys.exit(f"{who} needs {folder}; make it with `make parity`, or leave it out with --only.")
    environment = os.environ | {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)}
    command = [python, "-m", "benchmarks", name, "--worker", who, "--point", str(number)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        sys.exit(f"{who} failed at point {number} of {name}:\n{done.stderr[-3000:]}")
    return json.loads(lines[-1])


def _median(values):
    return None if None in values else statistics.median(values)  # None: what this machine has no room for


def machine():
    """What the figures depend on: processor, cores, memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB"


def write(document, case):
    """Writes results/<case>_<machine>_<date>.json and .png, and returns the stem of both."""
    RESULTS.mkdir(exist_ok=True)
    place = document["machine"].replace(", ", "-").replace(" ", "")
    stem = RESULTS / f"{document['case']}_{place}_{document['date']}"
    stem.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    draw(document, case, stem.with_suffix(".png"))
    return stem


def draw(document, case, path):
    """One panel a metric: lines over the case's x where it varies, bars where it does not."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    who = list(dict.fromkeys(row["who"] for row in document["rows"]))
    xs = list(dict.fromkeys(row["point"].get(case.X) for row in document["rows"]))
    figure, axes = plt.subplots(1, len(case.PANELS), figsize=(5.2 * len(case.PANELS), 3.8), layout="constrained")
    for ax, (metric, label) in zip([axes] if len(case.PANELS) == 1 else axes, case.PANELS, strict=True):
        for number, name in enumerate(who):
            values = {row["point"].get(case.X): row.get(metric) for row in document["rows"] if row["who"] == name}
            style = dict(color=f"C{number}", label=name)
            if len(xs) > 1:
                ax.plot(
                    xs, [values.get(x) for x in xs], marker="o", ls="-" if name.startswith("ours") else "--", **style
                )
            else:
                ax.barh(number, values[xs[0]], color=f"C{number}")
                value = values[xs[0]]
                ax.text(value, number, f" {value:,.0f}" if value >= 100 else f" {value:.3g}", va="center")
        if len(xs) > 1:
            ax.set(xlabel=case.X, xticks=xs, ylim=(0, None))
            ax.legend(fontsize="small")
        else:
            ax.set_yticks(range(len(who)), who)
            ax.invert_yaxis()
            ax.margins(x=0.15)
        ax.set_title(label)
        ax.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{document['what']} ({document['machine']})", fontsize="medium")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def table(document, case):
    """The rows as text."""
    metrics = [metric for metric, _ in case.PANELS]
    lines = [f"{'':26} {case.X:>12} " + " ".join(f"{m:>22}" for m in metrics)]
    for row in document["rows"]:
        cells = " ".join(f"{row[m]:>22.3f}" if row.get(m) is not None else f"{'-':>22}" for m in metrics)
        lines.append(f"{row['who']:26} {row['point'].get(case.X, ''):>12} {cells}")
    return "\n".join(lines)
