"""Several processes as one computation."""

import os
import random

import keras
import numpy as np

from keras_qwen import keras_private
from keras_qwen.ops import processes


def initialize(job_addresses=None, num_processes=None, process_id=None, *, timeout=45):
    """Makes this process one of several that train a model together, as `keras.distribution.initialize` does.

    To be called in each of them before anything is computed. The devices of all are then one list, of which
    `model_parallel` makes a mesh. All have to run the same program: what they load, train and save, they do together.
    `fit` is given the same data in each, and a process takes its rows of every batch; `ChatDataset` may be given its
    share instead, see there. Unless `keras.utils.set_random_seed` was called, the first process draws the seed for all.

    On JAX, a process that dies stops the others. Each loses its connection at once, or is missed after `timeout`.

    Args:
        job_addresses: address and port of the first process, `"10.0.0.1:1234"`; or of all of them, with commas. On some
            clusters the backend finds it, and the other two arguments, by itself.
        num_processes: how many there are.
        process_id: which this one is, from 0.
        timeout: seconds after which a process that does not answer, or that has ended before the others, counts as
            dead; JAX only. Where one goes on much longer than the others, it has to be larger.

    The environment variables KERAS_DISTRIBUTION_JOB_ADDRESSES, KERAS_DISTRIBUTION_NUM_PROCESSES and
    KERAS_DISTRIBUTION_PROCESS_ID stand in for arguments that are None.

    Raises:
        ValueError: for a process that is none of them, and for several addresses that are not as many as processes.
        RuntimeError: if the backend has computed something already, or the first process cannot be reached.

    Example:
        >>> kq.distribution.initialize("10.0.0.1:1234", num_processes=2, process_id=int(os.environ["RANK"]))
        >>> distribution = kq.distribution.model_parallel(config, {"fsdp": 8, "model": 2})
        >>> keras.distribution.set_distribution(distribution)
    """
    environment = os.environ.get
    job_addresses = job_addresses or environment("KERAS_DISTRIBUTION_JOB_ADDRESSES")
    num_processes = _number("num_processes", num_processes, environment("KERAS_DISTRIBUTION_NUM_PROCESSES"), 1)
    process_id = _number("process_id", process_id, environment("KERAS_DISTRIBUTION_PROCESS_ID"), 0)
    if not isinstance(timeout, int) or isinstance(timeout, bool) or timeout < 1:
        raise ValueError(f"timeout must be a positive number of seconds, not {timeout!r}.")
    if num_processes is not None and process_id is not None and process_id >= num_processes:
        raise ValueError(f"process_id={process_id} is none of {num_processes} processes, which count from 0.")
    addresses = job_addresses.split(",") if job_addresses else []
    if len(addresses) > 1 and num_processes not in (None, len(addresses)):
        raise ValueError(f"There are {len(addresses)} job_addresses and num_processes={num_processes}.")
    if keras.backend.backend() != "jax":
        return keras.distribution.initialize(job_addresses, num_processes, process_id)
    import jax

    jax.distributed.initialize(
        coordinator_address=addresses[0] if addresses else None,
        num_processes=num_processes,
        process_id=process_id,
        heartbeat_timeout_seconds=timeout,
        shutdown_timeout_seconds=timeout,
    )
    # Not Keras's way to one seed for all: that imports TensorFlow wherever it is installed.
    if not any(processes.gathered(keras_private.is_seeded())):
        seed = processes.of_first(random.randrange(2**31))
        random.seed(seed)
        np.random.seed(seed)


def _number(name, value, environment, least):
    value = int(environment) if value is None and environment else value
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
        raise ValueError(f"{name} must be an integer of at least {least}, not {value!r}.")
    return value
