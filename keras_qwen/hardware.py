"""What is known of accelerators, by name: memory, and how fast they could be; and how sizes are written."""

import re
from typing import NamedTuple


class Accelerator(NamedTuple):
    """One kind of device.

    Attributes:
        memory: bytes, as sold: of "80 GB", what a process can have is less, see `keras_qwen.planner`.
        peak_flops: dense multiply-adds in bfloat16 (float16 for T4 and V100) with float32 sums, operations a second.
        link: bytes a second that a device can send to its neighbours (NVLink, ICI, or PCIe), one direction.
    """

    memory: int
    peak_flops: float
    link: float


_GB = 10**9
# As the makers' data sheets say. The first name that is part of the device's counts.
ACCELERATORS = {
    "H200": Accelerator(141 * _GB, 989e12, 450e9),
    "H100 PCIe": Accelerator(80 * _GB, 756e12, 64e9),
    "H100 NVL": Accelerator(94 * _GB, 835e12, 300e9),
    "H100": Accelerator(80 * _GB, 989e12, 450e9),
    "A100-40": Accelerator(40 * _GB, 312e12, 300e9),
    "A100": Accelerator(80 * _GB, 312e12, 300e9),
    "A10G": Accelerator(24 * _GB, 70e12, 32e9),
    "A10": Accelerator(24 * _GB, 125e12, 32e9),
    "L40S": Accelerator(48 * _GB, 362e12, 32e9),
    "L4": Accelerator(24 * _GB, 121e12, 32e9),
    "V100": Accelerator(32 * _GB, 125e12, 150e9),
    "T4": Accelerator(16 * _GB, 65e12, 16e9),
    "RTX 4090": Accelerator(24 * _GB, 165e12, 32e9),
    "RTX 4080": Accelerator(16 * _GB, 97e12, 32e9),
    "RTX 3090": Accelerator(24 * _GB, 71e12, 32e9),
    "TPU v6": Accelerator(32 * _GB, 918e12, 448e9),
    "TPU v5p": Accelerator(95 * _GB, 459e12, 600e9),
    "TPU v5 lite": Accelerator(16 * _GB, 197e12, 200e9),
    "TPU v5e": Accelerator(16 * _GB, 197e12, 200e9),
    "TPU v5": Accelerator(95 * _GB, 459e12, 600e9),
    "TPU v4": Accelerator(32 * _GB, 275e12, 300e9),
}

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
UNITS |= {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "TIB": 2**40}


def accelerator(name) -> Accelerator | None:
    """What is known of a device by (a part of) its name, e.g. `"NVIDIA A100-SXM4-80GB"`; None if nothing is."""
    plain = _plain(name)
    return next((known for key, known in ACCELERATORS.items() if _plain(key) in plain), None)


def _plain(name):
    return re.sub(r"[^a-z0-9]", "", name.lower())


def memory_bytes(size) -> int:
    """`"80GB"`, `"80 GiB"`, a device's name (`"H100"`, `"A100-80"`), or a number of bytes, as bytes.

    A plain number below 10,000, or such a text (`"80"`), is taken for GB.

    Raises:
        ValueError: for what is none of these, and for sizes that are not positive.

    Example:
        >>> memory_bytes("24GB"), memory_bytes("24 GiB"), memory_bytes("A100-40"), memory_bytes("80")
        (24000000000, 25769803776, 40000000000, 80000000000)
    """
    if isinstance(size, bool) or not isinstance(size, str | int | float):
        raise ValueError(f"A memory size is a text such as '80GB' or a number of bytes, not {size!r}.")
    number, unit = size, ""
    if isinstance(size, str):
        match = re.fullmatch(r"\s*([+-]?\d+(?:\.\d+)?)\s*([kmgt]?i?b?)\s*", size, re.IGNORECASE)
        if match is None:
            known = accelerator(size)
            if known is None:
                raise ValueError(
                    f"Memory {size!r} is not understood: write '80GB', '80GiB', bytes, or one of "
                    f"{', '.join(ACCELERATORS)}."
                )
            return known.memory
        number, unit = float(match[1]), match[2].upper()
        if unit and unit not in UNITS:
            raise ValueError(f"Memory {size!r} has an unknown unit; known are {', '.join(UNITS)}.")
    if not number > 0:
        raise ValueError(f"A memory size must be positive, not {size!r}.")
    return int(number * (UNITS[unit] if unit else _GB if number < 10_000 else 1))
