"""keras-qwen plan."""

import pytest
from typer.testing import CliRunner

from keras_qwen.cli.app import app
from keras_qwen.cli.plan import parse_mesh


def run(*arguments):
    result = CliRunner().invoke(app, ["plan", *arguments])
    return result.exit_code, result.output


def test_a_plan(tmp_path):
    code, text = run(
        "Qwen/Qwen2.5-32B-Instruct", "--mesh", "fsdp=2,model=8", "--batch-size", "8", "--sequence_length", "4096",
        "--sequence-parallel", "--memory", "A100-80", "--plot", str(tmp_path / "plan.png"),
    )  # fmt: skip
    assert code == 0 and "fits into 75.20 GB" in text and "largest sequence length" in text
    assert (tmp_path / "plan.png").stat().st_size > 5000


def test_what_does_not_fit_exits_with_1():
    code, text = run("Qwen2.5-32B", "--memory", "24GB")
    assert code == 1 and "does not fit" in text
    code, text = run("Qwen2.5-0.5B", "--remat", "none", "--memory", "24GB")
    assert code == 0 and "remat None" in text


def test_suggestions():
    code, text = run("Qwen2.5-1.5B", "--suggest", "1", "--memory", "24GB", "--batch-size", "2")
    assert code == 0 and "qlora" in text
    assert run("Qwen2.5-1.5B", "--suggest", "1")[0] == 1


@pytest.mark.parametrize("mesh", ["data", "data=x", "data=2,data=3", "=2", "data=2;model=4"])
def test_a_mesh_that_is_written_wrongly(mesh):
    with pytest.raises(ValueError, match=r"--mesh|Unknown mesh axes"):
        parsed = parse_mesh(mesh)
        from keras_qwen.partitioning import checked_mesh

        checked_mesh(parsed)


def test_bad_settings_are_one_line():
    code, text = run("Qwen2.5-0.5B", "--mesh", "model=0")
    assert code == 1 and "positive number of devices" in text and "Traceback" not in text
