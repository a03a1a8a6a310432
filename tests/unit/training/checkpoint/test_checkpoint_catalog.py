"""Listing, choosing and retention over folders, with a store made of a folder."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from training.checkpoint import catalog, layout
from training.checkpoint.errors import CheckpointError, RemoteUnavailable
from training.checkpoint.layout import Manifest


class FolderRemote:
    """A store in a folder; counts the files it hands out."""

    def __init__(self, root: Path) -> None:
        self.root, self.away, self.downloads = root, False, 0

    def steps(self) -> dict[int, str]:
        if self.away:
            raise RemoteUnavailable("the object store cannot be reached", "")
        return {e.step: "marker" for e in catalog.scan(self.root) if e.manifest}

    def manifest(self, step: int) -> Manifest:
        return layout.read_manifest(self.root / layout.step_name(step))

    def download(self, step: int, target: Path, manifest: Manifest) -> None:
        for name in manifest.files:
            if not (target / name).exists():
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(self.root / layout.step_name(step) / name, target / name)
                self.downloads += 1


@pytest.fixture
def places(tmp_path, make_checkpoint):
    for place in ("here", "there"):
        for step in (10, 20):
            make_checkpoint(tmp_path / place, step)
    return tmp_path / "here", FolderRemote(tmp_path / "there")


def test_an_empty_or_missing_root_has_nothing(tmp_path):
    assert catalog.scan(tmp_path / "none") == []
    assert catalog.newest_valid(tmp_path / "none").folder is None


def test_scan_lists_sound_and_broken_ones(places):
    root, _ = places
    (root / "step-00000020" / "COMMIT").unlink()
    (root / "step-00000009x").mkdir()
    entries = catalog.scan(root)
    assert [(e.step, e.manifest is not None) for e in entries] == [(10, True), (20, False)]
    assert "never completed" in entries[1].problem


def test_a_damaged_local_copy_is_mended_from_the_store_with_only_the_bad_file(places):
    root, remote = places
    (root / "step-00000020" / "state.json").write_bytes(b"bad")
    choice = catalog.newest_valid(root, remote)
    assert choice.fetched
    assert choice.manifest.step == 20
    assert "state.json" in str(choice.passed_over[0])
    assert remote.downloads == 1
    assert catalog.newest_valid(root).folder == root / "step-00000020"


def test_a_newer_one_in_the_store_is_fetched(places, make_checkpoint):
    root, remote = places
    make_checkpoint(remote.root, 30)
    assert catalog.newest_valid(root, remote).folder == root / "step-00000030"
    assert remote.downloads == 4


def test_damage_in_the_store_is_passed_over(places, make_checkpoint):
    root, remote = places
    (make_checkpoint(remote.root, 30) / "state.json").write_bytes(b"bad")
    choice = catalog.newest_valid(root, remote)
    assert choice.manifest.step == 20
    assert "step-00000030 (remote)" in str(choice.passed_over[0])
    with pytest.raises(CheckpointError, match="damaged in the object store"):
        catalog.fetch(remote, 30, root)


def test_a_store_that_is_away_does_not_stop_the_resume(places):
    root, remote = places
    remote.away = True
    choice = catalog.newest_valid(root, remote)
    assert choice.manifest.step == 20
    assert "cannot be reached" in choice.passed_over[0].reason


def test_an_upper_limit_takes_an_older_one(places):
    assert catalog.newest_valid(places[0], at_most_step=19).manifest.step == 10


def test_prune_keeps_last_every_and_best(tmp_path, make_checkpoint):
    losses = {10: 3.0, 20: 1.0, 30: 2.0, 40: 2.5, 50: None, 60: 2.2}
    for step, loss in losses.items():
        make_checkpoint(tmp_path, step, evaluation_loss=loss)
    rule = {"keep_last": 1, "keep_every_steps": 40, "keep_best": 1}
    planned = catalog.prune(tmp_path, **rule, dry_run=True)
    assert [p.name for p in planned] == [layout.step_name(s) for s in (10, 30, 50)]
    assert len(catalog.scan(tmp_path)) == 6
    catalog.prune(tmp_path, **rule, spare=lambda step: step == 30)
    assert [e.step for e in catalog.scan(tmp_path)] == [20, 30, 40, 60]


def test_several_may_prune_and_look_at_once(tmp_path, make_checkpoint):
    for step in range(40):
        make_checkpoint(tmp_path, step)

    def look(_):
        return {entry.step for entry in catalog.scan(tmp_path) if entry.manifest is not None}

    with ThreadPoolExecutor(8) as pool:
        looks = pool.map(look, range(8))
        gone = list(pool.map(lambda _: catalog.prune(tmp_path, keep_last=2), range(8)))
        assert all(seen >= {38, 39} for seen in looks)
    removed = [folder.name for folders in gone for folder in folders]
    assert sorted(removed) == [layout.step_name(step) for step in range(38)], "each by one of them"
    assert [entry.step for entry in catalog.scan(tmp_path)] == [38, 39]


def test_one_that_is_removed_during_the_look_is_no_damaged_one(tmp_path, make_checkpoint, monkeypatch):
    for step in (10, 20):
        make_checkpoint(tmp_path, step)
    read = layout.committed_manifest

    def gone_before(folder):
        if layout.parse_step(folder.name) == 10:
            shutil.rmtree(folder)
        return read(folder)

    monkeypatch.setattr(layout, "committed_manifest", gone_before)
    assert [(entry.step, entry.problem) for entry in catalog.scan(tmp_path)] == [(20, "")]


def test_prune_leaves_damaged_ones_and_does_not_count_them(tmp_path, make_checkpoint):
    for step in (10, 20, 30):
        make_checkpoint(tmp_path, step)
    (tmp_path / "step-00000030" / "COMMIT").unlink()
    assert [p.name for p in catalog.prune(tmp_path, keep_last=1)] == ["step-00000010"]
    assert (tmp_path / "step-00000030").exists()
