"""Every notebook runs from top to bottom, and shows what it says."""

import os
from pathlib import Path

import nbclient
import nbformat
import pytest

FOLDER = Path(__file__).parents[2] / "notebooks"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda p: p.stem)
@pytest.mark.filterwarnings("ignore::DeprecationWarning:zmq", "ignore::RuntimeWarning:zmq")
def test_notebook(path, tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", os.environ["KERAS_BACKEND"])
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")  # as in Jupyter: into the page
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "commit notebooks without outputs"
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": tmp_path}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [o for o in outputs if o.get("name") == "stderr" and "Warning" in o["text"]]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    if path.stem == "quickstart":
        text = "".join(output.get("text", "") for output in outputs)
        losses = [float(line.split("val_loss: ")[1].split()[0]) for line in text.splitlines() if "val_loss" in line]
        assert losses[-1] < 0.8 * losses[0]
        assert "its logits are the same: True" in text
