"""What is known of the device that is trained on: its memory, and how fast it could be."""

import importlib
import os
import resource
import sys
from pathlib import Path
from typing import NamedTuple

import keras

from keras_qwen.hardware import accelerator


class Memory(NamedTuple):
    """Bytes in use, the most there were so far, and what there is; None for what is not known."""

    in_use: int
    peak: int | None
    limit: int | None


def _backend():
    """The backend's `device_name()`, None on a CPU, and `device_memory()`."""
    return importlib.import_module(f"keras_qwen.devices.backend_{keras.backend.backend()}")


def memory() -> Memory:
    """The accelerator's memory; on a CPU that of this process."""
    return process_memory() if _backend().device_name() is None else _backend().device_memory()


def accelerator_memory() -> int | None:
    """What an accelerator has, bytes; None on a CPU and where the backend does not say."""
    return None if _backend().device_name() is None else _backend().device_memory().limit


def operation_error() -> type[Exception]:
    """What the backend raises where an operation fails, for want of memory, say."""
    return _backend().OPERATION_ERROR


def peak_flops(compute_dtype) -> float | None:
    """What the device, or all devices of the mesh, can do in a second; None where it is not known.

    Args:
        compute_dtype: of the model; only the 16-bit types are known.
    """
    name = _backend().device_name()
    if name is None or compute_dtype not in ("bfloat16", "float16"):
        return None
    known = accelerator(name)
    distribution = keras.distribution.distribution()
    count = 1 if distribution is None else distribution.device_mesh.devices.size
    return None if known is None else known.peak_flops * count


def process_memory() -> Memory:
    """Resident memory of this process, its peak, and the machine's or container's memory."""
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak = usage if sys.platform == "darwin" else usage * 1024
    try:
        in_use = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux
        in_use = peak
    return Memory(in_use, max(peak, in_use), _machine_limit())


def _machine_limit():
    limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdigit():  # not "max"
            limit = min(limit, int(text))
    return limit
