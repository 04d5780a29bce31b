"""Which part of the package may import which, read from the source, and what importing the package may import."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "keras_qwen"
MODULES = sorted(PACKAGE.rglob("*.py"))

# A part imports only from those named before it.
ORDER = (
    "config hardware collectives devices ops parameters partitioning layers checkpoint compute_estimate "
    "memory_estimate communication_estimate tokenizer generation training models data callbacks distribution planner "
    "cli demo"
).split()
# These use the package as its users do, through `import keras_qwen as kq`.
USERS = {"cli", "demo"}
# Imported late, inside a function: QwenConfig.from_pretrained takes Hub ids, and only then reaches up.
EXCEPTIONS = {("config", "checkpoint")}
BACKENDS = {"tensorflow": "tensorflow", "jax": "jax", "jaxlib": "jax", "torch": "torch"}


def part_of(names):
    """The part a dotted module path below keras_qwen belongs to: "" for the package itself."""
    return names[0] if names else ""


def is_helper(part):
    """Helpers stand at the top, import nothing of the package, and all may import them."""
    return part.startswith("_") or part in ("backend", "keras_private", "keras_private_tensorflow")


def imported_names(node, module):
    """The absolute dotted names that one import statement of a module (names below the root) brings in."""
    if isinstance(node, ast.Import):
        return [alias.name.split(".") for alias in node.names]
    base = node.module.split(".") if node.module else []
    if node.level:
        base = [*module[: len(module) - node.level], *base]
    if base == ["keras_qwen"]:  # `from keras_qwen import ops` names a part, `from keras_qwen.ops import x` has named it
        return [[*base, alias.name] for alias in node.names]
    return [base]


def imports(source, module):
    """Every import in a source text, as (line, dotted names), those inside functions included."""
    statements = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    return [(node.lineno, names) for node in statements for names in imported_names(node, module)]


def order_violations(source, module):
    """What a module of the package imports against the order."""
    own = part_of(module[1:-1] if module[-1] == "__init__" else module[1:])
    found = []
    for line, names in imports(source, module):
        if names[0] != "keras_qwen" or own == "":
            continue
        part = part_of(names[1:])
        if is_helper(part) or part == own or (own, part) in EXCEPTIONS:
            continue
        if is_helper(own):
            found.append(f"line {line}: {own} is for all to import, so it imports nothing of the package")
        elif own in USERS and part == "":
            continue
        elif part not in ORDER or ORDER.index(part) >= ORDER.index(own):
            found.append(f"line {line}: {own} imports {part or 'the whole package'}")
    return found


def backend_violations(source, name):
    """Backends that a module imports on being imported itself, but for the one its file is named after."""
    found = []
    pending = list(ast.parse(source).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            for names in imported_names(node, ["keras_qwen", name]):
                backend = BACKENDS.get(names[0])
                if backend and not name.endswith(f"_{backend}"):
                    found.append(f"line {node.lineno}: {names[0]}")
        pending.extend(ast.iter_child_nodes(node))
    return found


def module_of(path):
    return list(path.relative_to(ROOT).with_suffix("").parts)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_module(path):
    source, module = path.read_text(), module_of(path)
    part = part_of(module[1:])
    assert part in (*ORDER, "__init__") or is_helper(part), f"{part} has no place in ORDER (DESIGN section 3)"
    assert order_violations(source, module) == []
    assert backend_violations(source, path.stem) == []


@pytest.mark.parametrize("folder", ["keras_qwen", "tests", "benchmarks"])
def test_files_are_short(folder):
    lengths = {path: len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*.py")}
    assert {str(path): length for path, length in lengths.items() if length > 400} == {}


@pytest.mark.parametrize(
    ("module", "statement", "allowed"),
    [
        ("layers.rms_norm", "from keras_qwen.ops.attention import attention", True),
        ("layers.rms_norm", "from ..config import QwenConfig", True),
        ("layers.rms_norm", "from .rotary import RotaryEmbedding", True),
        ("layers.__init__", "from .rotary import RotaryEmbedding", True),
        ("layers.rms_norm", "from keras_qwen._backend_check import require_backend", True),
        ("layers.rms_norm", "from keras_qwen import config", True),
        ("demo.recipe", "import keras_qwen as kq", True),
        ("__init__", "from keras_qwen.models.causal_lm import QwenCausalLM", True),
        ("layers.rms_norm", "from keras_qwen.models.causal_lm import QwenCausalLM", False),
        ("layers.rms_norm", "from ..models import causal_lm", False),
        ("layers.rms_norm", "def f():\n    from keras_qwen import models", False),
        ("layers.rms_norm", "import keras_qwen as kq", False),
        ("config", "import keras_qwen.parameters", False),
        ("_backend_check", "from keras_qwen.config import QwenConfig", False),
    ],
)
def test_order_is_held(module, statement, allowed):
    assert (order_violations(statement, ["keras_qwen", *module.split(".")]) == []) is allowed


@pytest.mark.parametrize(
    ("name", "source", "allowed"),
    [
        ("attention", "import jax.numpy as jnp", False),
        ("attention", "if True:\n    from tensorflow import function", False),
        ("attention", "class A:\n    import torch", False),
        ("attention", "def f():\n    import jax", True),
        ("attention_jax", "import jax", True),
        ("attention_jax", "import tensorflow", False),
    ],
)
def test_backends_are_imported_late(name, source, allowed):
    assert (backend_violations(source, name) == []) is allowed


def run_python(code, **environment):
    """Run code in a fresh Python; an environment variable given as None is taken away."""
    settings = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    settings = {name: value for name, value in settings.items() if value is not None}
    return subprocess.run([sys.executable, "-c", code], env=settings, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("backend", "others"), [("jax", ["tensorflow", "torch"]), ("tensorflow", ["torch"])])
def test_importing_brings_no_other_backend(backend, others):
    code = f"import sys, keras_qwen; print([name for name in {others} if name in sys.modules])"
    result = run_python(code, KERAS_BACKEND=backend)
    assert (result.stdout.strip(), result.returncode) == ("[]", 0), result.stderr


def test_training_on_jax_brings_no_tensorflow():
    # 450 MiB of host memory. Keras imports it by itself to serialise an object, where it is installed.
    code = """
import sys, keras, numpy as np, keras_qwen as kq
sizes = dict(vocab_size=64, hidden_size=16, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1)
config = kq.QwenConfig(num_hidden_layers=1, **sizes)
model, ids = kq.QwenCausalLM(config), np.ones((2, 8), "int32")
model.enable_lora(2)
model.compile(kq.training.AdamW(keras.optimizers.schedules.CosineDecay(1e-3, 10)))
model.fit({"token_ids": ids}, ids, callbacks=[kq.callbacks.GradientNorm(), kq.callbacks.LearningRate()], verbose=0)
model.evaluate({"token_ids": ids}, ids, verbose=0)
print("tensorflow" in sys.modules)
"""
    result = run_python(code, KERAS_BACKEND="jax")
    assert (result.stdout.strip(), result.returncode) == ("False", 0), result.stderr


@pytest.mark.parametrize(
    ("missing", "environment", "remedies"),
    [
        (["tensorflow", "jax", "torch"], {}, ["keras-qwen[tensorflow]", "keras-qwen[jax]"]),
        (["tensorflow", "torch"], {}, ["KERAS_BACKEND=jax", "keras-qwen[tensorflow]"]),
        (["jax", "torch"], {"KERAS_BACKEND": "jax"}, ["KERAS_BACKEND=tensorflow", "keras-qwen[jax]"]),
    ],
)
def test_missing_backend_names_the_remedy(missing, environment, remedies, tmp_path):
    # None in sys.modules is how Python itself marks a module that is not to be found.
    code = f"import sys; sys.modules.update(dict.fromkeys({missing})); import keras_qwen"
    result = run_python(code, **{"KERAS_BACKEND": None, "KERAS_HOME": str(tmp_path), **environment})
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert [remedy for remedy in remedies if remedy not in last] == []


def test_keras_settings_file_chooses_the_backend(tmp_path):
    (tmp_path / "keras.json").write_text('{"backend": "jax"}')
    code = "import sys; sys.modules['jax'] = None; from keras_qwen import _backend_check as b; b.require_backend()"
    result = run_python(code, KERAS_BACKEND=None, KERAS_HOME=str(tmp_path))
    last = result.stderr.strip().splitlines()[-1]
    assert str(tmp_path / "keras.json") in last and "KERAS_BACKEND=tensorflow" in last
