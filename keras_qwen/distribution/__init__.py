"""Models on several devices: meshes, layouts from the parameter table, and what each device holds."""

from keras_qwen.distribution.data_parallel import data_parallel
from keras_qwen.distribution.initialize import initialize
from keras_qwen.distribution.layouts import device_mesh, layout_map
from keras_qwen.distribution.model_parallel import QwenModelParallel, model_parallel
from keras_qwen.distribution.report import report

__all__ = [
    "QwenModelParallel",
    "data_parallel",
    "device_mesh",
    "initialize",
    "layout_map",
    "model_parallel",
    "report",
]
