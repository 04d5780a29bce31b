"""What this machine has: memory, disks, NVIDIA cards, installed packages. No backend is imported."""

import importlib.metadata
import os
import shutil
import subprocess
from pathlib import Path

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def total_memory():
    """Bytes of memory this process may use: the machine's, or its container's if that is less; None if not known."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
    limits = [int(text) for text in map(_text, _CGROUP_LIMITS) if text.isdigit()]
    return min([total, *limits])


def available_memory():
    """Bytes of memory that programs can still have, as Linux estimates it; None elsewhere."""
    for line in _text("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def free_disk(folder):
    """Bytes free where a folder is, or will be."""
    folder = Path(folder).expanduser().absolute()
    return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free


def nvidia_cards():
    """A line for each NVIDIA card that the driver knows: name, memory, the driver's version."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in result.stdout.splitlines() if line.strip()]


def version(distribution):
    """The version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _text(path):
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
