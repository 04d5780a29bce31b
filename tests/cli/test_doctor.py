"""`keras-qwen doctor`, with a backend and without one; and that the shell starts without Keras."""

import os
import subprocess
import sys
from pathlib import Path

import keras
import pytest

from keras_qwen import _backend_check
from keras_qwen.cli import machine

ROOT = Path(__file__).parent.parent.parent


def words(text):
    return " ".join(text.split())


def run_shell(code, *arguments, missing=(), **environment):
    """Runs code in a fresh Python that was started as `keras-qwen`, with modules that are not to be found."""
    settings = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    prepare = f"import sys; sys.modules.update(dict.fromkeys({list(missing)})); sys.argv = {['keras-qwen', *arguments]}"
    code = f"{prepare}\n{code}"
    return subprocess.run([sys.executable, "-c", code], env=settings, capture_output=True, text=True, check=False)


def test_ready(shell):
    backend = keras.backend.backend()
    result = shell("doctor")
    assert result.exit_code == 0, result.stdout
    text = words(result.stdout)
    assert f"{backend} {machine.version(backend)} <- Keras runs on it" in text
    assert f"keras {keras.__version__}" in text and "devices cpu:0" in text and "GB" in text
    assert text.endswith(f"ready: models run on {backend}")


@pytest.mark.parametrize("name", ["jax", "tensorflow"])
def test_the_chosen_backend_is_missing(name, shell, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", name)
    monkeypatch.setattr(_backend_check, "installed", lambda backend: backend == "torch")
    result = shell("doctor")
    assert result.exit_code == 1
    assert f"Keras is to run on {name} (chosen by KERAS_BACKEND)" in words(result.stdout)
    assert f'pip install "keras-qwen[{name}]"' in words(result.stdout)


def test_a_card_that_the_backend_does_not_see(shell, monkeypatch):
    monkeypatch.setattr(machine, "nvidia_cards", lambda: ["NVIDIA H200, 143771 MiB, 570.1"])
    result = shell("doctor")
    backend = keras.backend.backend()
    assert result.exit_code == 0
    assert f'{backend} does not see the NVIDIA card: pip install "keras-qwen[{backend}-cuda]"' in words(result.stdout)


def test_without_any_backend(tmp_path):
    """Doctor says what to install, `inspect` works, and `chat` says in a line why it cannot."""
    code = """
from keras_qwen.cli.app import main
def run(*arguments):
    sys.argv[1:] = arguments
    try:
        main()
    except SystemExit as status:
        print("STATUS", status.code)
run("doctor")
run("inspect", FOLDER)
run("chat", FOLDER, "--prompt", "Hi")
print("KERAS", "keras" in sys.modules)
"""
    folder = str(ROOT / "tests/data/reference/qwen2")
    result = run_shell(
        f"FOLDER = {folder!r}\n{code}",
        missing=["tensorflow", "jax", "torch"],
        KERAS_BACKEND="",
        KERAS_HOME=str(tmp_path),
    )
    text = words(result.stdout)
    assert result.returncode == 0, result.stderr
    assert (
        'missing: keras_qwen needs a backend for Keras, and none is installed. Install one: pip install "keras' in text
    )
    assert text.count("STATUS 1") == 2 and "right shape; values not read (--check-finite does) STATUS 0" in text
    assert text.endswith("KERAS False")
    assert "Error: keras_qwen needs a backend for Keras" in result.stderr and "Traceback" not in result.stderr


def test_the_package_is_imported_when_the_shell_uses_it():
    code = """
import keras_qwen as kq
assert "keras" not in sys.modules
from keras_qwen import config
assert "keras" not in sys.modules
assert kq.QwenConfig is config.QwenConfig and "keras" in sys.modules
assert set(kq.__all__) <= set(vars(kq)) and kq.layers.RMSNorm
try:
    kq.nothing
except AttributeError as problem:
    print(problem)
"""
    result = run_shell(code)
    assert (result.returncode, result.stdout.strip()) == (0, "module 'keras_qwen' has no attribute 'nothing'"), result


def test_started_as_a_module():
    command = [sys.executable, "-m", "keras_qwen.cli", "--help"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    for name in ("chat", "convert", "doctor", "inspect"):
        assert f" {name} " in result.stdout
