"""The device on PyTorch."""

import torch

from keras_qwen.devices import Memory

OPERATION_ERROR = RuntimeError


def device_name():
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def device_memory():
    return Memory(torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), torch.cuda.mem_get_info()[1])
