"""The compiler's account of a plan, from a process of its own."""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tempfile

from keras_qwen.planner.tables import gigabytes

_EXTRA = 'pip install "keras-qwen[planner]"'
# What libtpu wants to know where there is no TPU.
_NO_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """What the compiler says of a training step; prints as text.

    Attributes:
        plan: the plan that was compiled.
        topology: for what devices.
        argument_bytes: of each device: weights, optimizer state and batch.
        temp_bytes: gradients, activations and all that is made on the way.
        output_bytes, alias_bytes: what it returns, and how much of that lies where the arguments did.
        trace_seconds, compile_seconds: of Python and of the compiler.
        collectives: a tuple of `keras_qwen.collectives.Collective`.
    """

    plan: "object"
    topology: str
    argument_bytes: int
    temp_bytes: int
    output_bytes: int
    alias_bytes: int
    trace_seconds: float
    compile_seconds: float
    collectives: tuple = ()

    @property
    def total_bytes(self) -> int:
        """Bytes of each device: arguments, temporaries, and outputs that have a place of their own."""
        return self.argument_bytes + self.temp_bytes + self.output_bytes - self.alias_bytes

    @property
    def fits(self) -> bool | None:
        """Whether it fits into the plan's `usable_bytes`; None where the device's memory was not said."""
        return None if self.plan.usable_bytes is None else self.total_bytes <= self.plan.usable_bytes

    @property
    def error(self) -> float:
        """How far the plan's estimate is off: 0.05 for 5 % too much."""
        return self.plan.total_bytes / self.total_bytes - 1

    def __str__(self):
        fits = {None: "", True: ", fits", False: ", does not fit"}[self.fits]
        return (
            f"compiled for {self.topology}: {gigabytes(self.argument_bytes)} arguments + "
            f"{gigabytes(self.temp_bytes)} temporaries = {gigabytes(self.total_bytes)} on each device{fits}; estimated "
            f"{gigabytes(self.plan.total_bytes)} ({self.error:+.1%}); {self.compile_seconds:.0f} s"
        )


def _has(name):
    return importlib.util.find_spec(name) is not None


def compile_plan(plan, topology) -> CompiledStep:
    """See `MemoryPlan.compile`."""
    from keras_qwen.collectives import Collective

    if not _has("jax"):
        raise ImportError('compile needs JAX: pip install "keras-qwen[jax]".')
    if topology != "cpu" and not _has("libtpu"):
        raise ImportError(f"The topology {topology!r} needs libtpu (no TPU): {_EXTRA}.")
    setup = plan.setup
    request = dataclasses.asdict(dataclasses.replace(setup, config=None)) | {
        "config": setup.config.to_hf(),
        "mesh": setup.mesh or {"data": 1},
        "topology": topology,
        "attention": "auto",
        "device_memory": plan.usable_bytes,
    }
    environment = os.environ | _NO_TPU | {"JAX_PLATFORMS": "cpu", "KERAS_BACKEND": "jax"}
    if topology == "cpu":
        flag = f"--xla_force_host_platform_device_count={setup.devices}"
        environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    with tempfile.TemporaryFile("w+") as problems:
        done = subprocess.run(
            [sys.executable, "-m", "keras_qwen.planner.abstract_step_jax"],
            input=json.dumps(request),
            stdout=subprocess.PIPE,
            stderr=problems,
            text=True,
            env=environment,
        )
        if done.returncode:
            problems.seek(0)
            raise _problem(problems.read(), topology)
    found = json.loads(done.stdout.strip().splitlines()[-1])
    found["collectives"] = tuple(Collective(**one) for one in found["collectives"])
    return CompiledStep(plan=plan, topology=topology, **found)


def _problem(text, topology):
    last = (text.strip().splitlines() or ["no message"])[-1]
    kind, _, message = last.partition(": ")
    if kind == "ValueError":
        return ValueError(message)
    return RuntimeError(f"The step could not be compiled for {topology}: {last[:2000]}")
