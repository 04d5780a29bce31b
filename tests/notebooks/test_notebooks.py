"""Every notebook runs from top to bottom, and shows what it says."""

import os
from pathlib import Path

import nbclient
import nbformat
import pytest

FOLDER = Path(__file__).parents[2] / "notebooks"

# What must be true at the end of each notebook, in its own variables.
CLAIMS = {
    "chat_lora": [
        "history.history['loss'][-1] < 0.75 * history.history['loss'][0]",
        "history.history['val_loss'][-1] < history.history['val_loss'][0]",
        "polite[0] == 0 and polite[1] > 0.8 * len(questions)",
        "unchanged and same_adapter and same_merged",
        "trained < 0.1 * model.count_params()",
    ],
    "dpo": [
        "abs(start['loss'] - np.log(2)) < 1e-3 and history.history['val_loss'][-1] < 0.5",
        "history.history['val_reward_accuracy'][-1] > 0.9 and (chosen > rejected).mean() > 0.9",
        "abs(losses[0] - losses[1]) < 1e-4",
        "talkative[0] > 0.25 and talkative[1] < 0.5 * talkative[0]",
    ],
    "monitors": [
        "history.history['loss'][-1] < 0.7 * history.history['loss'][0]",
        "{'gradient_norm/layers_0', 'memory_peak_gb', 'tokens_per_second', 'learning_rate'} <= history.history.keys()",
        "'layers_1' in warning and 'step 1' in stopped",
        "resumed.history['loss'] == straight and len(straight) == epochs",
        "sorted(samples.texts) == [2, 4] and best.count_params() == model.count_params()",
    ],
    "qlora_small_card": [
        "sum(ways['full, mixed_bfloat16'].values()) > 24e9 > 16e9 > sum(ways['QLoRA, NF4'].values())",
        "count(small.config)[0] + count(small.config)[1] < small.count_params() < 1.01 * sum(count(small.config)[:2])",
        "4.0 < bits < 4.2 and costs[None] < costs['nf4'] < 1.05 * costs[None]",
        "history.history['loss'][-1] < 0.8 * history.history['loss'][0]",
        "abs(losses[quantised] - losses[merged]) < 1e-4 < losses[original] - losses[quantised]",
    ],
    "quickstart": [
        "history.history['val_loss'][-1] < 0.8 * history.history['val_loss'][0]",
        "history.history['loss'][-1] < 0.4 * history.history['loss'][0]",
        "same",
    ],
    "reuse_layers": [
        "history.history['val_accuracy'][-1] > 0.9 and same",
        "abs(float(lean) - float(plain)) < 1e-4",
        "language_history.history['loss'][-1] < 0.7 * language_history.history['loss'][0]",
    ],
    "scaling": [
        "full.fits and not ways['full, no remat'].fits and ways['LoRA 16 on NF4'].total_bytes < 10e9",
        "longest > 10_000 and most > 20 and suggestions[0].seconds == min(s.seconds for s in suggestions)",
        "np.allclose(one, split, rtol=1e-4) and split[-1] < 0.5 * split[0]",
        "lies.device_bytes < 0.4 * sum(4 * np.prod(v.shape) for v in alone.weights) and difference < 1e-4",
    ],
}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda p: p.stem)
@pytest.mark.filterwarnings("ignore::DeprecationWarning:zmq", "ignore::RuntimeWarning:zmq")
def test_notebook(path, tmp_path, monkeypatch):
    here, temporary = tmp_path / "here", tmp_path / "temporary"
    here.mkdir(), temporary.mkdir()
    monkeypatch.setenv("KERAS_BACKEND", os.environ["KERAS_BACKEND"])
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")  # as in Jupyter: into the page
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))  # else notebooks side by side share one history file
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells), "commit notebooks without outputs"
    claims = [nbformat.v4.new_code_cell(f"assert {claim}") for claim in CLAIMS[path.stem]]
    whole = nbformat.v4.new_notebook(cells=[*notebook.cells, *claims], metadata=notebook.metadata)
    nbclient.NotebookClient(whole, timeout=600, resources={"metadata": {"path": here}}).execute()
    outputs = [output for cell in whole.cells for output in cell.get("outputs", [])]
    assert not [o for o in outputs if o.get("name") == "stderr" and "Warning" in o["text"]]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not list(here.iterdir()), "notebooks write into temporary folders only"


def test_every_notebook_reads_well():
    """Prose before the first code, in cells that are few and short."""
    for path in FOLDER.glob("*.ipynb"):
        cells = nbformat.read(path, as_version=4).cells
        assert cells[0].cell_type == "markdown" and cells[0].source.startswith("# "), path.name
        assert len(cells) <= 25, path.name
        assert max(len(cell.source.splitlines()) for cell in cells) <= 40, path.name
