"""What a contestant measures of itself, inside its own process."""

import contextlib
import os
import resource
import statistics
import time
from pathlib import Path


def seconds(function, *, repeats=5, warm_up=2):
    """Median seconds of a call, after some that do not count (they compile)."""
    for _ in range(warm_up):
        function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def resident_mb():
    """Resident memory of this process now, in MiB."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def reset_peak():
    """Forgets the largest resident memory so far."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_since_reset_mb():
    """The largest resident memory since `reset_peak`, in MiB."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def memory_gb():
    """Memory of this machine, in GB."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9


def peak_mb():
    """The largest resident memory so far, in MiB; on a GPU that of the device, as the backend counts it."""
    return device_peak_mb() or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@contextlib.contextmanager
def beyond_state_mb(model):
    """Gives a function that says how far the peak rose above the model's weights and moments."""
    model.optimizer.build(model.trainable_variables)
    for variable in model.optimizer.variables:  # memory is taken when first written to
        variable.assign(variable.value * 1)
    state = resident_mb()
    yield lambda: peak_mb() - state


def device_peak_mb():
    """Peak bytes of the first accelerator in MiB, None on a CPU."""
    backend = os.environ.get("KERAS_BACKEND")
    if backend == "jax":
        import jax

        stats = jax.local_devices()[0].memory_stats() or {}
        return stats.get("peak_bytes_in_use", 0) / 2**20 or None
    if backend == "tensorflow":
        import tensorflow as tf

        if tf.config.list_logical_devices("GPU"):
            return tf.config.experimental.get_memory_info("GPU:0")["peak"] / 2**20
    if backend == "torch":
        import torch

        return torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else None
    return None


def matmul_gflops(size=1024):
    """What float32 matrix products reach in this process, in GFLOP/s: the yardstick of the arithmetic floor."""
    import keras

    a = keras.random.normal((size, size))
    product = keras.ops.matmul
    rate = seconds(lambda: keras.ops.convert_to_numpy(product(a, a)[0, 0]), repeats=7)
    return 2 * size**3 / rate / 1e9
