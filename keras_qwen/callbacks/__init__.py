"""Callbacks for `fit`: what to keep of a run, and what to see of it."""

from keras_qwen.callbacks.checkpoint import Checkpoint

__all__ = ["Checkpoint"]
