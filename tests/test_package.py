"""What is promised about the package as such: its public names, what it depends on, and what is in its wheel."""

import ast
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import keras_qwen as kq

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Distributions whose modules have another name.
MODULE_NAMES = {"absl-py": "absl", "huggingface-hub": "huggingface_hub", "pyyaml": "yaml"}
# Imported inside functions only, where a backend or a peer is at hand.
OPTIONAL = {"tensorflow", "jax", "torch", "keras_hub", "pyarrow", "orbax"}


def requirement_names(requirements):
    return {re.match(r"[\w-]+", requirement).group() for requirement in requirements}


def imported_modules():
    """The first names of every absolute import anywhere in the package."""
    found = set()
    for path in (ROOT / "keras_qwen").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize(
    "name",
    "QwenConfig QwenBackbone QwenCausalLM QwenTokenizer data.encode_chat layers.RMSNorm layers.RotaryEmbedding "
    "layers.GroupedQueryAttention layers.SwiGLUMLP layers.DecoderBlock layers.CheckpointedDecoderBlock "
    "ops.attention".split(),
)
def test_public_name(name):
    value = kq
    for part in name.split("."):
        value = getattr(value, part)
    assert callable(value) and value.__doc__


def test_dependencies_are_what_the_package_imports():
    declared = {MODULE_NAMES.get(name, name) for name in requirement_names(PROJECT["dependencies"])}
    third_party = imported_modules() - set(sys.stdlib_module_names) - {"keras_qwen"}
    assert third_party - OPTIONAL == declared


def test_extras():
    extras = PROJECT["optional-dependencies"]
    assert {"tensorflow", "jax", "tensorflow-cuda", "jax-cuda", "dev", "parity"} <= extras.keys()
    assert requirement_names(extras["tensorflow-cuda"]) == {"tensorflow"}
    assert requirement_names(extras["jax-cuda"]) == {"jax"}


def test_distributions_build(tmp_path):
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,), (sdist,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "keras_qwen").rglob("*.py")}
    metadata = {name for name in names if ".dist-info/" in name}
    assert names - metadata == sources | {"keras_qwen/demo/chats.jsonl"}
    assert any(name.endswith("licenses/LICENSE") for name in metadata)
    with tarfile.open(sdist) as archive:
        members = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "Makefile", "keras_qwen/demo/chats.jsonl", "tests/conftest.py"} <= members
