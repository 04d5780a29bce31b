"""FreezingMethods: choosing what is trained, and functions and optimizers that follow the choice."""

import re

import keras

from keras_qwen import keras_private
from keras_qwen.ops.placement import build_optimizer
from keras_qwen.parameters import is_adapter_path


class RetracedFunctions:
    """Mixin of a `keras.Model` whose `computation` may change.

    Keras traces a step once, with the variables that were trainable then. Here `fit`, `evaluate` and `predict` trace
    anew when these or the adapters have changed.
    """

    _traced = None

    def computation(self):
        """What the compiled functions depend on besides their arguments: a list that is compared by identity."""
        return list(self.trainable_variables)

    def make_train_function(self, force=False):
        return super().make_train_function(self.has_changed("train") or force)

    def make_test_function(self, force=False):
        return super().make_test_function(self.has_changed("test") or force)

    def make_predict_function(self, force=False):
        return super().make_predict_function(self.has_changed("predict") or force)

    def has_changed(self, function):
        """Whether `computation` is another than when this was last asked for a function, by its name."""
        self._traced = self._traced or _Traced()
        before, now = self._traced.by_function.get(function), self.computation()
        self._traced.by_function[function] = now
        return before is not None and not _same(before, now)


class FreezingMethods(RetracedFunctions):
    """Mixin of `QwenModel`: what is trained may change at any time, also by `layer.trainable`.

    The optimizer follows as long as it has made no step.
    """

    def freeze(self, patterns):
        """Stops training of the variables that patterns match.

        Args:
            patterns: a regular expression or several, searched in variables' paths such as
                `layers_0/self_attn/q_proj/kernel`.

        Raises:
            ValueError: for a pattern that matches no variable.

        Example:
            >>> model.freeze(["embed_tokens", r"layers_[0-7]/"])
        """
        for variable in self._matching(patterns):
            variable.trainable = False

    def train_only(self, patterns):
        """Trains the variables that patterns match, and nothing else; see `freeze`.

        Example:
            >>> model.train_only(["norm", "layers_23/"])
        """
        chosen = self._matching(patterns)
        if rescaled := [v.path for v in chosen if self._has_dora(v)]:
            raise ValueError(
                f"{rescaled[0]} has a DoRA adapter, which needs it frozen; use delete_adapter, or freeze it."
            )
        ids = {id(variable) for variable in chosen}
        for variable in self.weights:
            variable.trainable = id(variable) in ids

    def _matching(self, patterns):
        chosen = {}
        for pattern in (patterns,) if isinstance(patterns, str) else patterns:
            found = [v for v in self.weights if re.search(pattern, v.path) and not v.name.startswith("kernel_")]
            if not found:
                examples = ", ".join(v.path for v in self.weights[:3])
                raise ValueError(f"{pattern!r} matches no variable; their paths are like {examples}.")
            chosen |= {id(v): v for v in found}
        return list(chosen.values())

    def _has_dora(self, variable):
        layer = variable.path.rpartition("/")[0]
        return any(v.path.startswith(f"{layer}/lora_") and v.name == "kernel_squares" for v in self.weights)

    def frozen_paths(self):
        """Paths of the base's variables that are not trained, for `get_config`."""
        return [v.path for v in self.weights if not v.trainable and not is_adapter_path(v.path)]

    def restore_frozen_paths(self, paths):
        """Freezes those of the base's variables, and no others."""
        frozen = set(paths)
        for variable in self.weights:
            if not is_adapter_path(variable.path):
                variable.trainable = variable.path not in frozen

    def make_train_function(self, force=False):
        self.prepare_optimizer()
        return super().make_train_function(force)

    def train_on_batch(self, *args, **kwargs):
        self.prepare_optimizer()
        return super().train_on_batch(*args, **kwargs)

    def prepare_optimizer(self):
        """Builds the optimizer before a step is traced (TensorFlow traces one that makes variables twice)."""
        if not self.compiled:
            return  # Keras says so
        variables = self.trainable_variables
        if not variables:
            raise ValueError(f"Nothing is trainable. {self.why_nothing_is_trained()}")
        if not self.optimizer.built:
            build_optimizer(self.optimizer, variables)
        elif not _same(keras_private.optimized_variables(self.optimizer), variables):
            if int(keras.ops.convert_to_numpy(self.optimizer.iterations)):
                raise ValueError(
                    "What is trained has changed since this optimizer made its first step, so that its state belongs "
                    "to other variables: call compile again with a new optimizer."
                )
            self.optimizer = type(self.optimizer).from_config(self.optimizer.get_config())
            build_optimizer(self.optimizer, variables)

    def why_nothing_is_trained(self):
        """A remedy, for the error."""
        if self.quantization is not None:
            return "A quantised base is frozen: enable_lora adds an adapter to train."
        return "Use train_only, or set trainable on the model or its layers."


class _Traced:
    """What functions were traced for; an object, because Keras takes variables in a dict for the model's own."""

    def __init__(self):
        self.by_function = {}


def _same(a, b):
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))
