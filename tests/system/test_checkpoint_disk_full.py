"""A disk that really fills up, and a file that really may not grow: the old checkpoint stays, the cause is said."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from training.checkpoint import catalog
from training.checkpoint.layout import Manifest
from training.checkpoint.ranks import OneRank
from training.checkpoint.saver import write_together
from training.checkpoint.verify import verify

pytestmark = pytest.mark.system


def _save(root: Path, step: int, floats: int):
    files = {"deepspeed/shard.pt": {"weights": torch.zeros(floats)}, "state.json": b"{}"}
    return write_together(root, files, Manifest(step, 1, 1, "fp32", 0, 0, "c", "t", 1.0), OneRank())


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small disk here ({mounted.stderr.strip()}); run as root")
    yield folder / "checkpoints"
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_fails_the_save_and_leaves_the_old_one(small_disk):
    folder, _, error = _save(small_disk, 10, 200_000)
    assert error is None
    failed, _, error = _save(small_disk, 20, 2_000_000)
    assert failed is None
    assert "the disk is full" in error.cause
    assert "MiB free" in error.cause
    assert "training goes on" in error.remedy
    assert catalog.newest_valid(small_disk).folder == folder
    again, _, error = _save(small_disk, 30, 200_000)  # the space of the failed save was given back
    assert error is None
    assert verify(again) == []


_LIMITED = """
import resource, sys
from pathlib import Path
from tests.system.test_checkpoint_disk_full import _save
root = Path(sys.argv[1])
assert _save(root, 10, 1000)[2] is None
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
error = _save(root, 20, 2_000_000)[2]
print(error.cause)
assert _save(root, 30, 1000)[2] is None
"""


def test_a_file_size_limit_is_named(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", _LIMITED, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "a file grew over the size limit" in done.stdout
    assert [entry.step for entry in catalog.scan(tmp_path)] == [10, 30]
