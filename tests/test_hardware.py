"""Sizes and devices by name."""

import pytest

from keras_qwen.hardware import accelerator, memory_bytes


@pytest.mark.parametrize(
    ("size", "number"),
    [
        ("24GB", 24 * 10**9), ("24 GB", 24 * 10**9), ("80GiB", 80 * 2**30), ("80", 80 * 10**9), (80, 80 * 10**9),
        ("80 gib", 80 * 2**30), ("16G", 16 * 10**9), ("512MB", 512 * 10**6), (25_769_803_776, 24 * 2**30),
        ("0.5TB", 5 * 10**11), ("H100", 80 * 10**9), ("A100-40", 40 * 10**9), ("A100-80", 80 * 10**9),
        ("NVIDIA A100-SXM4-80GB", 80 * 10**9), ("RTX 4090", 24 * 10**9), ("v5p" and "TPU v5p", 95 * 10**9),
    ],
)  # fmt: skip
def test_memory(size, number):
    assert memory_bytes(size) == number


@pytest.mark.parametrize("size", ["0GB", "-3 GB", 0, -1, "much", "3 XB", True, None, "", "nan"])
def test_bad_memory(size):
    with pytest.raises(ValueError, match=r"[Mm]emory"):
        memory_bytes(size)


def test_names_as_backends_say_them():
    assert accelerator("NVIDIA H100 80GB HBM3").peak_flops == 989e12
    assert accelerator("NVIDIA GeForce RTX 4090").memory == 24 * 10**9
    assert accelerator("TPU v5 lite").peak_flops == 197e12
    assert accelerator("Radeon") is None
