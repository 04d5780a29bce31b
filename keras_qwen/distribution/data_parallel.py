"""Data parallelism: the whole model on each device, a part of each batch for each."""

import json
import os

import keras

from keras_qwen.distribution.model_parallel import model_parallel


def data_parallel(config, devices=None):
    """What makes a model train on several devices, each with all weights and a part of each batch.

    Make or load the model, and compile it, in its `scope()`. On JAX `fit` belongs in there,
    too; on TensorFlow it may stand behind.

    The loss is `sum(w * ce) / sum(w)` over the whole batch, and gradients are those of one device, however the tokens
    that count are spread over the devices. So are what `logs` and `evaluate` report.

    On JAX it is `model_parallel(config, {"data": n})`. On TensorFlow it is a `tf.distribute.MirroredStrategy`, or in
    each of several processes that `TF_CONFIG` names a `MultiWorkerMirroredStrategy`. There

    - `fit` takes a `tf.data.Dataset` of whole batches, the same in each process, which are divided among them: set
      `experimental_distribute.auto_shard_policy` to `DATA` in its options;
    - when one process dies, the others stop with TensorFlow's error. Start all of them again: with
      `kq.callbacks.Checkpoint`, in a folder of its own for each process, training goes on where it was. Should the
      newest states be of different steps, because one died while the others saved, delete those that not all have;
    - explicit Keras losses weigh what the devices have as Keras does, not by tokens.

    Args:
        config: the model's config.
        devices: how many devices, or their names; default: all of this process. With several processes each takes
            its own.

    Returns:
        An object with `scope()`.

    Raises:
        ValueError: for a number of devices that there are not, and for `devices` together with several processes.

    Example:
        >>> with kq.distribution.data_parallel(config).scope():
        ...     model = kq.QwenCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
        ...     model.compile(keras.optimizers.AdamW(1e-5))
        ...     model.fit(dataset)
    """
    several = _processes() > 1
    if several and devices is not None:
        raise ValueError("TF_CONFIG names several processes, each of which takes its own devices: leave out devices=.")
    if several:
        import tensorflow as tf

        return tf.distribute.MultiWorkerMirroredStrategy()
    names = _names(devices)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.distribute.MirroredStrategy(names)
    return model_parallel(config, keras.distribution.DeviceMesh((len(names),), ("data",), names))


def _processes():
    if keras.backend.backend() != "tensorflow":
        return 1
    cluster = json.loads(os.environ.get("TF_CONFIG") or "{}").get("cluster", {})
    return sum(len(cluster.get(kind, [])) for kind in ("chief", "worker"))


def _names(devices):
    there = keras.distribution.list_devices()
    if devices is None:
        return there
    names = there[:devices] if isinstance(devices, int) and not isinstance(devices, bool) and devices > 0 else devices
    if isinstance(names, int) or (isinstance(devices, int) and len(names) < devices):
        raise ValueError(
            f"devices={devices!r}: there are {len(there)} devices, {', '.join(map(str, there))}. For a trial on a CPU, "
            f"simulate more: tf.config.set_logical_device_configuration (TensorFlow), or "
            f"XLA_FLAGS=--xla_force_host_platform_device_count=n (JAX), before the backend starts."
        )
    return list(names)
