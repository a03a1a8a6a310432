"""Writing together: all ranks or none, and what is said when it fails (ranks are threads here)."""

from __future__ import annotations

import errno
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from training.checkpoint import catalog, saver
from training.checkpoint.layout import Manifest
from training.checkpoint.saver import write_together
from training.checkpoint.verify import verify

WORLD = 3


class ThreadRanks:
    """A rank of a world of threads; `gather` is a barrier."""

    def __init__(self, rank: int, barrier: threading.Barrier, slots: list[Any]) -> None:
        self.rank, self.world_size = rank, WORLD
        self._barrier, self._slots = barrier, slots

    def gather(self, value: Any) -> list[Any]:
        self._slots[self.rank] = value
        self._barrier.wait()
        values = list(self._slots)
        self._barrier.wait()
        return values


def _manifest(step: int) -> Manifest:
    return Manifest(step, WORLD, 1, "fp32", 0, 0, "c", "t", 1.0)


def _save(root: Path, step: int, **more: Any) -> list[Any]:
    barrier, slots = threading.Barrier(WORLD, timeout=10), [None] * WORLD

    def one(rank: int) -> Any:
        files = {f"deepspeed/shard-{rank}.pt": {"rank": rank}, f"rng/{rank}.pt": [rank]}
        if rank == 0:
            files["state.json"] = b"{}"
        return write_together(root, files, _manifest(step), ThreadRanks(rank, barrier, slots), **more)

    with ThreadPoolExecutor(WORLD) as pool:
        return list(pool.map(one, range(WORLD)))


def test_the_files_of_all_ranks_become_one_checkpoint(tmp_path):
    results = _save(tmp_path, 10)
    folders = {folder for folder, _, _ in results}
    assert folders == {tmp_path / "step-00000010"}
    assert verify(tmp_path / "step-00000010") == []
    assert len(results[0][1]) == 2 * WORLD + 1
    assert (tmp_path / "latest").read_text() == "step-00000010\n"


@pytest.mark.parametrize("failing", range(WORLD))
def test_an_error_on_any_rank_fails_the_save_on_all(tmp_path, monkeypatch, failing):
    _save(tmp_path, 10)
    original = saver.write_all

    def full(folder, files):
        if f"rng/{failing}.pt" in files:
            raise OSError(errno.ENOSPC, "No space left on device", str(folder / "x"))
        return original(folder, files)

    monkeypatch.setattr(saver, "write_all", full)
    results = _save(tmp_path, 20)
    for folder, entries, error in results:
        assert folder is None
        assert entries == {}
        assert f"rank {failing}: " in error.cause
        assert "the disk is full" in error.cause
        assert "MiB free" in error.cause
        assert "free space" in error.remedy
    assert catalog.newest_valid(tmp_path).manifest.step == 10
    assert not (tmp_path / ".staged-step-00000020").exists(), "the space is given back"
    monkeypatch.undo()
    assert _save(tmp_path, 30)[0][0] == tmp_path / "step-00000030"


def test_a_failure_to_stage_or_commit_reaches_all(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    results = _save(tmp_path / "file", 10)
    assert all(error is not None for _, _, error in results)

    def broken(folder: Path) -> None:
        raise ValueError("retention broke")

    results = _save(tmp_path, 10, after_commit=broken)
    assert all("ValueError: retention broke" in error.cause for _, _, error in results)


def test_files_that_are_not_on_a_shared_disk_are_refused(tmp_path, monkeypatch):
    original = saver.write_all

    def elsewhere(folder, files):
        entries = original(folder, files)
        if "rng/2.pt" in files:
            (folder / "rng/2.pt").unlink()  # as if rank 2 wrote to the disk of its own node
        return entries

    monkeypatch.setattr(saver, "write_all", elsewhere)
    _, _, error = _save(tmp_path, 10)[0]
    assert "rng/2.pt was written by another node" in error.cause
    assert "all nodes share" in error.remedy
    assert catalog.newest_valid(tmp_path).folder is None


def test_a_rank_that_is_gone_fails_the_save_without_an_exception(tmp_path):
    class Gone(ThreadRanks):
        def gather(self, value):
            raise RuntimeError("connection closed by peer")

    ranks = Gone(0, threading.Barrier(1), [None])
    folder, _, error = write_together(tmp_path, {}, _manifest(1), ranks)
    assert folder is None
    assert "another rank is gone" in error.cause
