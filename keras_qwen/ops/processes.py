"""Several processes that run one program: what they agree on, and what one does for all.

There are several after `keras_qwen.distribution.initialize` on JAX. With one process, nothing is exchanged.
"""

import contextlib
import json
import sys

import keras
import numpy as np

from keras_qwen.backend import host_value

_LOST = ("gloo", "nccl", "heartbeat", "coordination", "barrier", "connection", "peer")


def count() -> int:
    """The number of processes."""
    return _ask("process_count", 1)


def index() -> int:
    """Which of the processes this is, from 0."""
    return _ask("process_index", 0)


def _ask(question, alone):
    if keras.backend.backend() != "jax":
        return alone
    import jax

    return getattr(jax, question)()


def gathered(content) -> list:
    """What each process has to say, for all of them, in their order; all have to call it.

    Args:
        content: what JSON can hold.
    """
    if count() == 1:
        return [content]
    from jax.experimental.multihost_utils import process_allgather

    said = np.frombuffer(json.dumps(content, default=str).encode(), "uint8")
    sizes = process_allgather(np.array([said.size], "int32"))[:, 0]
    padded = np.zeros(1 << int(sizes.max()).bit_length(), "uint8")  # few sizes: each is a program to be compiled
    padded[: said.size] = said
    return [json.loads(bytes(row[:size])) for row, size in zip(process_allgather(padded), sizes, strict=True)]


def of_first(content):
    """What the first process has to say, for all of them; all have to call it."""
    return gathered(content if index() == 0 else None)[0]


def check_same(what, settings):
    """Raises ValueError in every process if their settings differ, instead of letting them wait for each other.

    Args:
        what: what the settings are of, for the message.
        settings: {name: value}.
    """
    if count() == 1:
        return
    found = gathered(settings)
    names = sorted({name for one in found for name in one})
    different = [name for name in names if any(one.get(name) != found[0].get(name) for one in found)]
    if different:
        lines = "".join(
            f"\n  {name}: {', '.join(f'{one.get(name)!r} in process {i}' for i, one in enumerate(found))}"
            for name in different
        )
        raise ValueError(f"The processes differ in {what}:{lines}\nStart all of them with the same program.")


@contextlib.contextmanager
def explained():
    """Inside, an error of JAX's that comes from another process's end says so.

    Raises:
        RuntimeError: naming the reason and the remedy.
    """
    if count() == 1:
        yield
        return
    import jax

    try:
        yield
    except jax.errors.JaxRuntimeError as problem:
        if not any(word in str(problem).lower() for word in _LOST):
            raise
        raise RuntimeError(
            f"Process {index()} of {count()} stops, because another one has ended or does not answer: what that one "
            f"printed last says why. Start all of them again; with callbacks.Checkpoint they go on from their last "
            f"state. ({str(problem).splitlines()[0]})"
        ) from problem


def by_first(action):
    """Calls `action` in the first process alone; the others wait, and get what it returned. All have to call it.

    Args:
        action: function without arguments; returns what JSON can hold.

    Raises:
        OSError: in the other processes, if it failed in the first, where its own exception is raised.
    """
    if count() == 1:
        return action()
    result = failure = None
    try:
        if index() == 0:
            result = action()
    finally:
        problem = sys.exception()
        result, failure = of_first([result, problem and f"{type(problem).__name__}: {problem}"])
    if failure is not None:
        raise OSError(f"The first process, which writes for all, failed: {failure}")
    return result


def written_by_first(variables, write):
    """Calls `write(values)` in the first process alone, while all of them gather the values. All have to call it.

    Args:
        variables: list of variables.
        write: function of an iterator of the variables' values, numpy arrays, in their order: each is gathered when it
            is asked for, so that one is in memory at a time. What it leaves is gathered, too, for the others' sake.

    Raises:
        OSError: in the other processes, if it failed in the first, where its own exception is raised.
    """
    values = (host_value(variable.value) for variable in variables)

    def action():
        try:
            write(values)
        finally:
            if count() > 1:
                _exhaust(values)

    if index() > 0:
        _exhaust(values)
    by_first(action)


def _exhaust(values):
    for _ in values:
        pass
