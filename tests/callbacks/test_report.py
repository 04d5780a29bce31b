"""The report: which panels, which numbers in them, and a picture of them."""

import matplotlib.image
import pytest

from keras_qwen.callbacks import report

HISTORY = {
    "loss": [3.0, 2.0, 1.5],
    "val_loss": [3.1, 2.4, 2.2],
    "gradient_norm": [2.0, 1.0, 0.8],
    "gradient_norm/layers_0": [1.0, 0.5, 0.4],
    "memory_in_use_gb": [4.0, 4.1, 4.1],
    "memory_limit_gb": [16.0, 16.0, 16.0],
}


def test_panels_and_their_numbers(tmp_path):
    figure = report(HISTORY, tmp_path / "run.png")
    panels = {axis.get_title(loc="left"): axis for axis in figure.axes if axis.axison}
    assert list(panels) == ["Loss", "Gradient norm", "Memory"]
    assert [list(line.get_ydata()) for line in panels["Loss"].lines] == [HISTORY["loss"], HISTORY["val_loss"]]
    assert list(panels["Gradient norm"].lines[0].get_ydata()) == HISTORY["gradient_norm/layers_0"]
    assert [text.get_text() for text in panels["Memory"].get_legend().get_texts()] == ["in use", "limit"]
    picture = matplotlib.image.imread(tmp_path / "run.png")
    assert picture.shape[1] > 1000 and 0.01 < (picture[..., :3].min(axis=2) < 0.7).mean() < 0.3


def test_takes_what_fit_returns_and_refuses_nothing():
    class History:
        history = {"loss": [1.0]}

    assert len(report(History()).axes) == 1
    with pytest.raises(ValueError, match="holds none of loss, memory, ...; it has nothing"):
        report({})


def test_a_notebook_shows_it():
    assert report({"loss": [1.0]})._repr_png_().startswith(b"\x89PNG")
