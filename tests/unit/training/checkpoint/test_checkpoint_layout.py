"""The commit protocol: complete or not there, whatever happens in between."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from training.checkpoint import catalog, layout
from training.checkpoint.verify import verify


class Crash(BaseException):
    """Stands for the end of the process at one moment."""


def _count_down(monkeypatch: pytest.MonkeyPatch, operations: int) -> list[int]:
    """Lets `operations` changes of the file system happen, then crashes at every further one."""
    left = [operations]

    def guard(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if left[0] <= 0:
                raise Crash
            left[0] -= 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, wrapped)

    for owner, name in (
        (Path, "mkdir"),
        (Path, "rename"),
        (Path, "write_bytes"),
        (Path, "open"),
        (layout.os, "fsync"),
        (layout.shutil, "rmtree"),
    ):
        guard(owner, name)
    return left


@pytest.mark.parametrize("replace", [False, True], ids=["new step", "same step again"])
def test_a_crash_before_any_single_operation_leaves_a_sound_checkpoint(tmp_path, replace, make_checkpoint, fill):
    for operations in range(1000):
        root = tmp_path / str(operations)
        make_checkpoint(root, 10)
        target = 10 if replace else 20
        with pytest.MonkeyPatch.context() as patch:
            left = _count_down(patch, operations)
            try:
                staged = layout.stage(root, target)
                layout.commit(staged, root, fill(staged, target, {"a.pt": b"new", "deep/b.pt": b"newer"}))
                finished = left[0] >= 0
            except Crash:
                finished = False
        layout.recover(root)
        choice = catalog.newest_valid(root)
        assert choice.folder is not None, f"nothing to resume from after {operations} operations"
        assert choice.manifest.step >= 10
        assert not choice.passed_over
        assert [p.name for p in root.iterdir() if p.name.startswith(".")] == []
        if finished:
            assert choice.manifest.step == target
            assert set(choice.manifest.files) == {"a.pt", "deep/b.pt"}
            break
    assert 10 < operations < 200


def test_a_complete_staged_folder_is_put_in_place(tmp_path, make_checkpoint):
    folder = make_checkpoint(tmp_path, 10)
    folder.rename(tmp_path / ".staged-step-00000010")
    assert layout.recover(tmp_path) == ["step-00000010: was complete but not yet in place; finished"]
    assert verify(folder) == []


def test_an_unfinished_staged_folder_is_removed(tmp_path, fill):
    fill(layout.stage(tmp_path, 10), 10)
    (note,) = layout.recover(tmp_path)
    assert "interrupted" in note
    assert list(tmp_path.iterdir()) == []


def test_staging_starts_empty(tmp_path, fill):
    fill(layout.stage(tmp_path, 10), 10)
    assert list(layout.stage(tmp_path, 10).iterdir()) == []


def test_manifest_round_trip(tmp_path, make_checkpoint):
    folder = make_checkpoint(tmp_path, 10, evaluation_loss=2.5)
    manifest = layout.read_manifest(folder)
    assert layout.Manifest.from_bytes(manifest.to_bytes()) == manifest
    assert manifest.size_bytes == sum((folder / name).stat().st_size for name in manifest.files)
    assert manifest.evaluation_loss == 2.5


@pytest.mark.parametrize("name", ["../evil", "/etc/passwd", "a/../../b", ""])
def test_a_manifest_cannot_point_outside(tmp_path, make_checkpoint, name):
    raw = json.loads(layout.read_manifest(make_checkpoint(tmp_path, 1)).to_bytes())
    raw["files"][name] = {"size_bytes": 1, "sha256": "0"}
    with pytest.raises(ValueError, match="outside"):
        layout.Manifest.from_bytes(json.dumps(raw).encode())


def test_names_and_steps_are_inverse():
    assert layout.step_name(120) == "step-00000120"
    assert layout.parse_step(layout.step_name(123456789)) == 123456789
    assert layout.parse_step("step-12") is None
    assert layout.parse_step("latest") is None


def test_the_last_save_is_that_of_the_newest_committed_step(tmp_path, make_checkpoint):
    assert layout.last_save(tmp_path / "none") is None
    for step, moment in ((10, 300.0), (20, 200.0), (30, 100.0)):
        os.utime(make_checkpoint(tmp_path, step) / "COMMIT", (moment, moment))
    (tmp_path / "step-00000030" / "COMMIT").unlink()
    (tmp_path / "step-other").mkdir()
    layout.stage(tmp_path, 40)
    assert layout.last_save(tmp_path) == 200.0, "step 30 was not completed, and 10 is older whatever its time says"


def test_one_that_is_removed_during_the_look_was_not_the_last_save(tmp_path, make_checkpoint, monkeypatch):
    for step in (10, 20):
        os.utime(make_checkpoint(tmp_path, step) / "COMMIT", (float(step), float(step)))
    read = Path.stat

    def gone_before(path, **how):
        if path.parent.name == "step-00000020":
            shutil.rmtree(path.parent, ignore_errors=True)
        return read(path, **how)

    monkeypatch.setattr(Path, "stat", gone_before)
    assert layout.last_save(tmp_path) == 10.0
