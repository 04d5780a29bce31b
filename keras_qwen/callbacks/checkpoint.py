"""Checkpoint: a training run that goes on where it was killed."""

import math
import random
import time
import warnings

import keras
import numpy as np

from keras_qwen.backend import host_value
from keras_qwen.callbacks.continuation import ContinuedCallbacks, ContinuedHistory, SkippingStep
from keras_qwen.callbacks.data_order import replayable
from keras_qwen.callbacks.fingerprint import differences, fingerprint
from keras_qwen.callbacks.interruption import Interruption
from keras_qwen.callbacks.state_folder import REMEDY, StateFolder
from keras_qwen.keras_private import global_seed_state
from keras_qwen.ops import processes
from keras_qwen.ops.placement import build_optimizer


class Checkpoint(keras.callbacks.Callback):
    """Saves the state of training, so that the same script, run again, goes on where it was killed.

    A run that was killed at any moment (`kill -9` included) and run again gives the losses and weights of one that was
    not, to the last bit on CPU. `fit` with this callback restores by itself: weights, optimizer, running means, random
    seeds, history, and the place in the data, also within an epoch. A state is written beside the others first and
    renamed at the end, so that there is always a whole one.

    - `kq.data.ChatDataset` begins at the right batch.
    - Arrays and `PyDataset`s are shuffled by `seed` and the number of the pass over them, and begin at the right batch.
      A `PyDataset` whose batches depend on more than their index changes in `on_epoch_end` alone, by a seed of its own.
    - `tf.data`, grain, generators: the batches that were trained on are read and dropped. They have to come in the same
      order each time: for tf.data `shuffle(n, seed=1, reshuffle_each_iteration=False)`, or
      `shuffle(n, seed=1).repeat()` with `steps_per_epoch`.

    On several devices under JAX, each process writes what its devices hold through orbax (the extra `distributed`), all
    into one folder that they share; the first one writes the rest. Such a run goes on to the last bit on the same mesh,
    and on any other mesh, or one device, but for the order of sums.

    What other callbacks count (the patience of `EarlyStopping`) begins anew. A run that one of them stopped early is
    not trained further when resumed.

    Args:
        folder: where the states are kept; one folder for one `fit`.
        every: `"epoch"`, or a number of steps after which to save. The end of training is always saved.
        keep: how many states to keep.
        best: name of a metric in `logs`, e.g. `"val_loss"`: after each epoch in which it was the best so far, the model
            is saved in Hugging Face's form in `folder/best`, only the adapter if there is one.
        mode: `"min"` or `"max"`, which is best; by default `"max"` for names with "accuracy", else `"min"`.
        weights: `"trainable"` (the frozen ones are as the script loads them) or `"all"`.
        seed: of the order of shuffled data; by default drawn from Python's `random`, and kept with the states.

    Raises:
        ValueError: in `fit`, if config, tokenizer, data or optimizer are not those of the saved state, naming what
            differs; when the loss or the gradient becomes NaN or infinite, naming the step and the last good state.
        OSError: if a state cannot be saved or read, naming the folder; older states are untouched.
        ImportError: on several devices, if orbax is not installed.
        KeyboardInterrupt: after Ctrl-C, when the step is done and saved; after SIGTERM, `SystemExit`.

    Example:
        >>> checkpoint = kq.callbacks.Checkpoint("run", every=200, best="val_loss")
        >>> model.fit(dataset, validation_data=held_out, epochs=3, callbacks=[checkpoint])
        >>> model = kq.QwenCausalLM.from_pretrained("run/best")

    With a Keras model that is not of this package, call `kq.training.fit(model, ...)` in the place of `model.fit(...)`.
    """

    saves_state = True

    def __init__(self, folder, every="epoch", *, keep=2, best=None, mode=None, weights="trainable", seed=None):
        super().__init__()
        if every != "epoch" and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
            raise ValueError(f"every must be 'epoch' or a positive number of steps, not {every!r}.")
        if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
            raise ValueError(f"keep must be a positive integer, not {keep!r}.")
        if mode not in (None, "min", "max"):
            raise ValueError(f"mode must be 'min' or 'max', not {mode!r}.")
        if weights not in ("trainable", "all"):
            raise ValueError(f"weights must be 'trainable' or 'all', not {weights!r}.")
        self.every, self.best, self.weights, self.seed = every, best, weights, seed
        self.mode = mode or ("max" if "accuracy" in (best or "") else "min")
        self.states = StateFolder(folder, keep)
        self._interruption = Interruption()
        self._prepared = False

    # before `fit` ----------------------------------------------------------------------------------------------------

    def before_fit(self, model, arguments):
        """The arguments of `fit` for the rest of the run; see `keras_qwen.training.fitting`."""
        self.states.clean()
        self._depends_on = fingerprint(model, arguments)
        # In every run, so that what Python draws later is the same in each.
        drawn = processes.of_first(random.randint(0, 2**31 - 1))
        self._order_seed = drawn if self.seed is None else self.seed
        self._position = dict(epoch=arguments["initial_epoch"], batch=0)
        self._step, self._history, self._epochs, self._best_value = 0, {}, [], None
        steps = processes.of_first(self.states.steps())
        self._saved_step = steps[-1] if steps else None
        self._saved = self.states.read(steps[-1]) if steps else None
        if self._saved is not None:
            self._take_up(model, arguments)
        self._data, self._start = arguments["x"], self._step
        arguments, positioned = replayable(arguments, self._order_seed, self._start)
        if self._saved is not None:
            arguments = self._continued(model, arguments, positioned)
        self._prepared = True
        return arguments

    def _take_up(self, model, arguments):
        saved = self._saved
        if different := differences(saved["depends_on"], self._depends_on):
            lines = "\n  ".join(different)
            raise ValueError(f"{self.states.folder} holds the states of another run:\n  {lines}\n{REMEDY}")
        self._order_seed, self._step = saved["order_seed"], saved["step"]
        self._position = dict(epoch=saved["epoch"], batch=saved["batch"])
        self._history, self._epochs, self._best_value = saved["history"], saved["epochs"], saved["best"]
        if saved["stopped_early"] or saved["epoch"] >= arguments["epochs"]:
            self._position["epoch"] = max(saved["epoch"], arguments["epochs"])
            print(f"{self.states.folder}: training is done ({saved['step']} steps). To train anew, delete the folder.")
        else:
            print(
                f"{self.states.folder}: going on after step {saved['step']} (epoch {saved['epoch'] + 1}, "
                f"{saved['batch']} batches of it done)."
            )

    def _continued(self, model, arguments, positioned):
        arguments["initial_epoch"] = self._position["epoch"]
        self._consume = 0 if positioned else self._batches_to_drop(arguments)
        history = ContinuedHistory(self._epochs, self._history)
        arguments["callbacks"] = ContinuedCallbacks(
            [history if type(c) is keras.callbacks.History else c for c in arguments["callbacks"]],
            self._position["batch"],
            add_history=True,
            add_progbar=arguments["verbose"] != 0,
            verbose=arguments["verbose"],
            epochs=arguments["epochs"],
            steps=arguments["steps_per_epoch"] or _length(arguments["x"]),
            model=model,
        )
        return arguments

    def _batches_to_drop(self, arguments):
        if not arguments["steps_per_epoch"]:  # every epoch begins at the front
            return self._position["batch"]
        length = _length(arguments["x"])
        return self._step % length if length else self._step

    # in `fit` --------------------------------------------------------------------------------------------------------

    def on_train_begin(self, logs=None):
        if not self._prepared:
            raise ValueError(
                "Checkpoint has to see fit's data. Models of keras_qwen show it by themselves; for others, call "
                "keras_qwen.training.fit(model, ...) in the place of model.fit(...)."
            )
        if hasattr(self._data, "start_at"):  # again: Keras has looked at a batch since, maybe the last of an epoch
            self._data.start_at(self._start)
        model = self.model
        if not model.optimizer.built:
            build_optimizer(model.optimizer, model.trainable_variables)
        if self._saved is not None:
            self.states.restore(self._saved_step, self._variables(model))
            SkippingStep(model, self._position["batch"], self._consume, self._saved["logs"])
        self._last_saved, self._stopped = self._saved_step, False
        self._batches = self._position["batch"]
        self._interruption.install()

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch, self._first_step = epoch, self._step
        if self._saved is not None:  # `fit` has just set the running means to zero
            self._first_step -= self._position["batch"]
            if self._position["batch"]:
                self._restore_means()
            self._saved = None
        else:
            self._batches = 0

    def on_train_batch_end(self, batch, logs=None):
        before, self._batches = self._step, batch + 1
        self._step = self._first_step + self._batches
        self._logs = dict(logs or {})
        self._check_finite(self._logs)
        if self._interrupted():
            self._save(self._epoch, self._batches)
            self._say_and_stop()
        if self.every != "epoch" and before // self.every < self._step // self.every:
            self._save(self._epoch, self._batches)

    def on_epoch_end(self, epoch, logs=None):
        self._epochs.append(epoch)
        for name, value in (logs or {}).items():
            self._history.setdefault(name, []).append(float(value))
        if self.best is not None:
            self._save_best(logs or {})
        self._logs, self._epoch = {}, epoch + 1
        interrupted = self._interrupted()
        if self.every == "epoch" or interrupted:
            self._save(epoch + 1, 0)
        if interrupted:
            self._say_and_stop()

    def on_train_end(self, logs=None):
        stopped_early = bool(self._model.stop_training)
        if self._epochs and (self._last_saved != self._step or stopped_early):
            self._save(self._epochs[-1] + 1, 0, stopped_early=stopped_early)

    def after_fit(self):
        """Called when `fit` is over, in whatever way."""
        self._interruption.remove()
        model = self._model
        if model is not None and isinstance(model.train_function, SkippingStep):
            model.train_function = model.train_function.train_function
        self._prepared = False

    # saving ----------------------------------------------------------------------------------------------------------

    def _variables(self, model):
        weights = model.weights if self.weights == "all" else model.trainable_variables
        known = {id(v) for v in model.weights}
        return {
            "weights": weights,
            "optimizer": model.optimizer.variables,
            "seeds": [global_seed_state(), *(v for v in model.variables if id(v) not in known)],
        }

    def _means(self, model):
        """The running means of an unfinished epoch, by name: a run may be resumed with other callbacks."""
        return {f"{m.name}-{i}": v for m in model.metrics for i, v in enumerate(m.variables)}

    def _restore_means(self):
        means, variables = self._saved["means"], self._means(self.model)
        for name in means.keys() & variables.keys():
            variables[name].assign(np.asarray(means[name], variables[name].dtype))
        if missing := means.keys() - variables.keys():
            warnings.warn(
                f"The metrics {', '.join(sorted(missing))} do not exist yet: in logs, this epoch's values are those of "
                f"its remaining batches.",
                stacklevel=2,
            )

    def _save(self, epoch, batch, stopped_early=False):
        model = self.model  # on JAX, this fetches the values that training has reached
        means = {name: host_value(v.value).tolist() for name, v in self._means(model).items()}
        self.states.save(
            self._step,
            dict(
                time=time.strftime("%Y-%m-%d %H:%M:%S"),
                epoch=epoch,
                batch=batch,
                stopped_early=stopped_early,
                logs=self._logs if batch else {},
                means=means if batch else {},
                epochs=self._epochs,
                history=self._history,
                best=self._best_value,
                order_seed=self._order_seed,
                depends_on=self._depends_on,
            ),
            self._variables(model),
        )
        self._last_saved = self._step

    def _save_best(self, logs):
        if self.best not in logs:
            raise ValueError(f"best={self.best!r} is not in logs, which have {', '.join(sorted(logs))}.")
        value = float(logs[self.best])
        if not math.isfinite(value):
            return
        sign = 1 if self.mode == "min" else -1
        if self._best_value is not None and sign * value >= sign * self._best_value:
            return
        self._best_value = value
        folder, model = self.states.folder / "best", self.model
        try:
            if getattr(model, "active_adapter", None) is None:
                model.save_pretrained(folder)
            else:
                model.save_adapter(folder)
        except OSError as problem:
            raise OSError(problem.errno, f"The best model cannot be saved in {folder}: {problem}.") from problem

    # stopping --------------------------------------------------------------------------------------------------------

    def _check_finite(self, logs):
        # A loss scale makes up for infinite gradients by leaving out the step.
        for name in ["loss"] if "loss_scale" in logs else ["loss", "gradient_norm"]:
            if not math.isfinite(logs.get(name, 0.0)):
                last = "no state is saved"
                if self._last_saved is not None:
                    last = f"the last good state is {self.states.path(self._last_saved)}"
                raise ValueError(
                    f"The {name.replace('_', ' ')} is {logs[name]} in step {self._step} (epoch {self._epoch + 1}, "
                    f"batch {self._batches}); {last}. Lower the learning rate, clip the gradient "
                    f"(global_clipnorm=1.0), or look at that batch; ActivationStatistics names the layer."
                )

    def _interrupted(self):
        """Whether this process or another one was told to stop; all have to ask together."""
        self._interruption.received = max(processes.gathered(self._interruption.received or 0)) or None
        return self._interruption.received is not None

    def _say_and_stop(self):
        message = (
            f"Saved after step {self._step} in {self.states.path(self._step)}. Run the same script again to go on."
        )
        print(message, flush=True)
        self._interruption.stop(message)


def _length(dataset):
    try:
        return len(dataset)
    except TypeError:
        return None
