"""The devices that torch computes on; see `keras_qwen.cli.doctor`."""

import torch


def devices():
    found = [("cpu", "cpu", None)]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append((f"cuda:{index}", properties.name, properties.total_memory))
    return found
