"""Replacing what a folder holds in one step, so that a kill or a full disk leaves the old contents or the new."""

import contextlib
import ctypes
import os
import shutil
import tempfile
from pathlib import Path

_EXCHANGE = 2  # RENAME_EXCHANGE of renameat2(2)
_AT_FDCWD = -100


@contextlib.contextmanager
def replaced_folder(folder, stale):
    """Yields an empty folder to write into; at the end it takes the place of `folder`.

    Files of `folder` that are not stale are carried over (as hard links). If the body raises, `folder` is untouched.

    Args:
        folder: the folder to replace; created, with its parents, if missing.
        stale: tells by name whether a file of the old folder is to be dropped.

    Raises:
        OSError: if `folder` is a file, or writing fails.
    """
    folder = Path(folder).resolve()  # a link stays a link: what it points to is replaced
    if folder.exists() and not folder.is_dir():
        raise OSError(f"{folder} is a file; a checkpoint is a folder.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{folder.name}.saving-"
    _remove_left_over(folder.parent, prefix)
    new = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=folder.parent))
    try:
        os.chmod(new, 0o777 & ~_umask() if not folder.exists() else folder.stat().st_mode & 0o7777)
        yield new
        if folder.exists():
            for entry in folder.iterdir():
                if not stale(entry.name) and not (new / entry.name).exists():
                    _carry_over(entry, new / entry.name)
        put_in_place(new, folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def put_in_place(new, folder):
    """Renames the folder `new` to `folder`, in one step, and removes what was there; both lie in one folder."""
    _sync(new)
    _swap(new, folder)
    _sync(folder.parent)
    shutil.rmtree(new, ignore_errors=True)


def _swap(new, folder):
    """Puts `new` at `folder`; the old folder, if any, ends up at `new`."""
    if not folder.exists() or not any(folder.iterdir()):
        os.rename(new, folder)  # atomic, also onto an empty folder
        return
    if _exchange(new, folder):
        return
    # Not this system: two renames, the shortest time without a folder that there is.
    old = new.with_name(new.name + "-old")
    os.rename(folder, old)
    os.rename(new, folder)
    shutil.rmtree(old, ignore_errors=True)


def _exchange(a, b) -> bool:
    """Exchanges two folders atomically; False where the system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    return libc.renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), ctypes.c_uint(_EXCHANGE)) == 0


def _carry_over(entry, target):
    entry = Path(entry)
    if entry.is_symlink() or not entry.is_dir():
        try:
            os.link(entry, target, follow_symlinks=False)
        except OSError:  # a file system without hard links
            shutil.copy2(entry, target, follow_symlinks=False)
    else:
        shutil.copytree(entry, target, symlinks=True, copy_function=_carry_over)


def _remove_left_over(parent, prefix):
    """Removes what an earlier process left when it was killed while saving."""
    for path in parent.glob(f"{prefix}*"):
        owner = path.name.removeprefix(prefix).split("-")[0]
        if owner.isdigit() and not _alive(int(owner)):
            shutil.rmtree(path, ignore_errors=True)


def _alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync(folder):
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
