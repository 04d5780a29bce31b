"""Callbacks for `fit`: what to keep of a run, and what to see of it."""

from keras_qwen.callbacks.activation_statistics import ActivationStatistics
from keras_qwen.callbacks.checkpoint import Checkpoint
from keras_qwen.callbacks.communication_cost import CommunicationCost
from keras_qwen.callbacks.device_memory import DeviceMemory
from keras_qwen.callbacks.gradient_norm import GradientNorm
from keras_qwen.callbacks.learning_rate import LearningRate
from keras_qwen.callbacks.report import report
from keras_qwen.callbacks.samples import Samples
from keras_qwen.callbacks.throughput import Throughput

__all__ = [
    "ActivationStatistics",
    "Checkpoint",
    "CommunicationCost",
    "DeviceMemory",
    "GradientNorm",
    "LearningRate",
    "Samples",
    "Throughput",
    "report",
]
