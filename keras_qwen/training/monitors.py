"""What a training step can report besides its loss, computed inside it from what it has anyway."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What a monitor sees of a step, all tensors of the compiled step.

    Attributes:
        inputs: the batch's inputs, a dict with `token_ids` (batch, length).
        weights: float32 (batch, length), how much each position counts; before any scaling.
        squares: {variable path: the float32 sum of its squared gradient}, the loss scale taken out.
        learning_rate: of this step.
    """

    inputs: dict[str, Any]
    weights: Any
    squares: dict[str, Any]
    learning_rate: Any


class Monitor:
    """One more thing that `logs` hold; a callback brings it, and `fit` traces the step with it.

    Subclasses set `metrics`, Keras metrics whose results go into `logs` under their names, and update them from a
    `StepResult`. Two monitors of one class with the same `key` are the same: the step is not traced anew for them.

    Args:
        metrics: the Keras metrics.
        key: what tells this monitor from others of its class.
    """

    def __init__(self, metrics, key=()):
        self.metrics, self.key = list(metrics), (type(self), *key)

    def update(self, result: StepResult):
        """Updates the metrics; called once a step, while it is traced."""
        raise NotImplementedError
