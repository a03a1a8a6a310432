"""The manager: when it saves, what it tells, what it prunes (with a saver that writes without an engine)."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from training.checkpoint import catalog, layout, manager
from training.checkpoint.errors import CheckpointError, RemoteUnavailable
from training.checkpoint.manager import CheckpointManager
from training.checkpoint.ranks import OneRank
from training.checkpoint.saver import Identity, SaveResult
from training.checkpoint.state import SavedProgress
from training.checkpoint.upload_progress import note_uploaded
from training.config import RunConfig


class PlainSaver:
    """Stands for the saver: commits a small file at once, or fails."""

    def __init__(self, engine, root, ranks, identity, *, asynchronous, after_commit):
        self.root, self.after_commit, self.results, self.error = root, after_commit, [], None

    def save(self, progress, evaluation_loss, *, wait):
        if self.error is None:
            staged = layout.stage(self.root, progress.step)
            (staged / "state.json").write_bytes(progress.to_bytes())
            files = {"state.json": layout.hash_file(staged / "state.json")}
            manifest = layout.Manifest(
                progress.step, 1, 1, "fp32", 0, 0, "c", "t", 1.0, evaluation_loss=evaluation_loss, files=files
            )
            self.after_commit(layout.commit(staged, self.root, manifest))
        folder = None if self.error else self.root
        self.results.append(SaveResult(progress.step, folder, self.error, 0.25, 2.0, 1 << 20))
        return 0.25

    def poll(self):
        results, self.results = self.results, []
        return results

    def wait(self):
        pass

    close = poll


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def make(tmp_path, monkeypatch):
    monkeypatch.setattr(manager, "Saver", PlainSaver)
    events: list[tuple[str, int, str]] = []
    clock = Clock()

    def build(**checkpoint):
        section = RunConfig.model_validate({"checkpoint": checkpoint}).checkpoint
        identity = Identity("c", "t")

        def note(*event, **numbers):
            events.append(event)

        built = CheckpointManager(None, tmp_path, section, "run", identity, OneRank(), note, clock=clock)
        return built, events, clock

    return build


def _save(checkpoints: CheckpointManager, step: int, loss: float | None = None) -> None:
    checkpoints.save(SavedProgress(step, 0, step * 8), loss)


def test_due_by_steps_and_by_minutes(make):
    by_steps, _, _ = make(interval_steps=10)
    assert [step for step in range(1, 31) if by_steps.due(step)] == [10, 20, 30]
    by_time, _, clock = make(interval_minutes=1)
    assert not by_time.due(5)
    clock.now += 61
    assert by_time.due(5)
    _save(by_time, 5)
    assert not by_time.due(6)


def test_auto_learns_from_the_measured_stall(make):
    checkpoints, _, _ = make(interval_steps="auto", gpu_hours_between_failures=1)
    before = checkpoints.interval.seconds
    _save(checkpoints, 1)
    checkpoints.poll()
    assert checkpoints.interval.seconds == pytest.approx((2 * 0.25 * 3600) ** 0.5)
    assert checkpoints.interval.seconds < before


def test_saves_are_told_and_old_ones_pruned(make, tmp_path):
    checkpoints, events, _ = make(interval_steps=10, keep_last=2, keep_best=1)
    for step, loss in ((10, 1.0), (20, 3.0), (30, 2.0), (40, None)):
        _save(checkpoints, step, loss)
    checkpoints.poll()
    assert [event[:2] for event in events] == [("checkpoint", step) for step in (10, 20, 30, 40)]
    assert "the step loop waited 0.250 s" in events[0][2]
    assert [entry.step for entry in catalog.scan(tmp_path)] == [10, 30, 40]


def test_a_failed_save_is_told(make):
    checkpoints, events, _ = make(interval_steps=10)
    checkpoints._saver.error = CheckpointError("checkpoint not saved: the disk is full", "free space")
    _save(checkpoints, 10)
    (result,) = checkpoints.poll()
    assert not result.ok
    assert events == [("checkpoint_failed", 10, "checkpoint not saved: the disk is full\n  next: free space")]


def test_a_run_without_checkpoints_starts_anew(make):
    checkpoints, _, _ = make()
    assert checkpoints.resume() is None


def test_checkpoints_that_cannot_be_used_are_no_fresh_start(make, tmp_path):
    checkpoints, _, _ = make()
    _save(checkpoints, 10)
    (tmp_path / "step-00000010" / "state.json").write_text("x")
    with pytest.raises(CheckpointError, match="no checkpoint can be trusted"):
        checkpoints.resume()


class AwayStore:
    """A store that is away until `back` is set."""

    def __init__(self) -> None:
        self.back = threading.Event()

    def steps(self):
        return {}

    def upload(self, folder: Path) -> None:
        if not self.back.is_set():
            raise RemoteUnavailable("the object store cannot be reached", "")
        note_uploaded(folder, (folder / "COMMIT").read_bytes())


def test_pending_uploads_are_told_at_the_end(make, monkeypatch):
    store = AwayStore()
    monkeypatch.setattr(manager, "open_store", lambda section, name: store)
    checkpoints, events, _ = make(remote="s3://ckpts/x")
    checkpoints.start_uploads()
    _save(checkpoints, 10)
    checkpoints.close(upload_timeout_s=0.05)
    assert events[-1][0] == "checkpoint_upload_delayed"
    assert "1 checkpoint(s) still to upload" in events[-1][2]

    store.back.set()
    again, events, _ = make(remote="s3://ckpts/x")
    events.clear()
    again.start_uploads()
    again.close(upload_timeout_s=10)
    assert [event[:2] for event in events] == [("checkpoint_uploaded", 10)]


class FolderStore(AwayStore):
    """A store that is there and remembers its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.back.set()
        self.held: dict[int, layout.Manifest] = {}

    def steps(self):
        return dict.fromkeys(self.held, "marker")

    def manifest(self, step):
        return self.held[step]

    def upload(self, folder: Path) -> None:
        manifest = layout.read_manifest(folder)
        self.held[manifest.step] = manifest
        super().upload(folder)

    def delete(self, step):
        del self.held[step]


def test_retention_holds_in_the_store_too(make, monkeypatch):
    store = FolderStore()
    monkeypatch.setattr(manager, "open_store", lambda section, name: store)
    checkpoints, _, _ = make(remote="s3://ckpts/x", keep_last=2, keep_best=0)
    checkpoints.start_uploads()
    for step in (10, 20, 30):
        _save(checkpoints, step)
        assert checkpoints._uploader.drain(10)
    checkpoints.close()
    assert sorted(store.held) == [20, 30]
