"""A folder is replaced whole or not at all, whatever happens in between."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from keras_qwen.checkpoint import replacing
from keras_qwen.checkpoint.replacing import replaced_folder


def contents(folder):
    return {str(p.relative_to(folder)): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture
def old(tmp_path):
    folder = tmp_path / "model"
    (folder / "notes").mkdir(parents=True)
    (folder / "config").write_text("old")
    (folder / "shard-2").write_text("old")
    (folder / "README").write_text("mine")
    (folder / "notes" / "x").write_text("mine too")
    return folder


def stale(name):
    return name in ("config",) or name.startswith("shard")


def replace(folder):
    with replaced_folder(folder, stale) as new:
        (new / "config").write_text("new")
        (new / "shard-1").write_text("new")


AFTER = {"config": "new", "shard-1": "new", "README": "mine", "notes/x": "mine too"}


@pytest.mark.parametrize("exchange", [True, False])
def test_new_files_replace_stale_ones_and_others_stay(old, exchange, monkeypatch):
    if not exchange:
        monkeypatch.setattr(replacing, "_exchange", lambda a, b: False)
    replace(old)
    assert contents(old) == AFTER
    assert [p.name for p in old.parent.iterdir()] == ["model"]


def test_a_new_folder_with_its_parents(tmp_path):
    replace(tmp_path / "a" / "b")
    assert contents(tmp_path / "a" / "b") == {"config": "new", "shard-1": "new"}


def test_an_empty_folder_keeps_its_mode(tmp_path):
    (tmp_path / "model").mkdir(mode=0o700)
    replace(tmp_path / "model")
    assert (tmp_path / "model").stat().st_mode & 0o777 == 0o700


def test_an_error_leaves_all_as_it_was(old):
    before = contents(old)
    with pytest.raises(OSError, match="No space left"), replaced_folder(old, stale) as new:
        (new / "config").write_text("half")
        raise OSError(28, "No space left on device")
    assert contents(old) == before and [p.name for p in old.parent.iterdir()] == ["model"]


def test_a_link_goes_on_pointing_at_the_folder(old, tmp_path):
    (tmp_path / "latest").symlink_to(old)
    replace(tmp_path / "latest")
    assert (tmp_path / "latest").is_symlink() and contents(old) == AFTER


def test_a_file_is_refused(tmp_path):
    (tmp_path / "model").write_text("a file")
    with pytest.raises(OSError, match="is a file"):
        replace(tmp_path / "model")
    assert (tmp_path / "model").read_text() == "a file"


def test_kill_leaves_the_old_contents_and_the_next_run_cleans_up(old):
    before = contents(old)
    script = f"""
        import os, signal
        from keras_qwen.checkpoint.replacing import replaced_folder
        with replaced_folder({str(old)!r}, lambda name: True) as new:
            (new / "config").write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], env=os.environ)
    assert done.returncode == -signal.SIGKILL
    assert contents(old) == before
    assert len(list(old.parent.iterdir())) == 2  # what the killed process was writing
    replace(old)
    assert contents(old) == AFTER and [p.name for p in old.parent.iterdir()] == ["model"]


def test_another_living_process_is_left_alone(old):
    theirs = old.parent / f".model.saving-{os.getppid()}-x"
    theirs.mkdir()
    replace(old)
    assert theirs.is_dir()
