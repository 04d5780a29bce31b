"""The loss of every training step, and its picture."""

import keras
from matplotlib.figure import Figure


class StepLosses(keras.callbacks.Callback):
    """Collects the loss of each training step.

    Keras reports the mean over the epoch so far, here weighted by trained tokens; from two such means and the number
    of tokens behind them follows what the last step added.

    Args:
        trained_tokens: the number of trained tokens of every step of the run.

    Attributes:
        losses: one loss a step.
    """

    def __init__(self, trained_tokens):
        super().__init__()
        self.trained_tokens = trained_tokens
        self.losses = []

    def on_epoch_begin(self, epoch, logs=None):
        self._tokens = self._total = 0.0

    def on_train_batch_end(self, batch, logs=None):
        new_tokens = float(self.trained_tokens[len(self.losses)])
        tokens = self._tokens + new_tokens
        total = logs["loss"] * tokens
        self.losses.append((total - self._total) / new_tokens)
        self._tokens, self._total = tokens, total


def plot_losses(path, step_losses, held_out_losses, title):
    """Draws the loss of every step and on the held-out chats.

    Args:
        path: the PNG file to write.
        step_losses: one training loss a step.
        held_out_losses: held-out losses at equal distances, the first before training and the last after it.
        title: the figure's title.

    Example:
        >>> plot_losses("loss.png", [3.0, 2.0, 1.5, 1.2], [3.1, 1.9, 1.4], "Qwen on 20 chats")
    """
    steps, epochs = len(step_losses), len(held_out_losses) - 1
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(range(1, steps + 1), step_losses, color="tab:blue", linewidth=0.8, label="training, each step")
    axes.plot(
        [epoch * steps / epochs for epoch in range(epochs + 1)],
        held_out_losses,
        "o-",
        color="tab:orange",
        markersize=4,
        linewidth=2,
        label=f"held-out chats, each epoch: from {held_out_losses[0]:.2f} to {held_out_losses[-1]:.2f}",
    )
    axes.set(title=title, xlabel="training step", ylabel="loss per answer token (nats)", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
