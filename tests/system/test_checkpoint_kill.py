"""kill -9 at a hundred random moments of save and upload: never a torn checkpoint, never a committed one lost."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.checkpoint_kill_worker import NAMES, content
from tests.system.checkpoint_s3_server import S3Server, use_credentials
from training.checkpoint import catalog, layout
from training.checkpoint.remote import S3Settings, S3Store
from training.checkpoint.upload import Uploader, pending

KILLS = 100
ROOT = Path(__file__).parents[2]


@pytest.mark.system
def test_a_hundred_kills(tmp_path, monkeypatch):
    use_credentials(monkeypatch)
    server = S3Server(tmp_path / "s3")
    server.start()
    root, log = tmp_path / "checkpoints", tmp_path / "committed.log"
    worker = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("checkpoint_kill_worker.py")), str(root), server.url, str(log)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    draw = random.Random(20260)
    store = S3Store(S3Settings("s3://ckpts/kill", server.url, part_bytes=65536))
    remote_newest = 0
    try:
        for kill in range(KILLS):
            worker.stdin.write(f"{draw.uniform(0.01, 0.25)}\n")
            worker.stdin.flush()
            assert worker.stdout.readline() == "killed\n"
            committed = int(log.read_text().split()[-1]) if log.exists() and log.read_text() else 0
            layout.recover(root)
            choice = catalog.newest_valid(root)
            assert not choice.passed_over, (
                f"kill {kill}: a torn checkpoint lay under a final name: {choice.passed_over}"
            )
            found = choice.manifest.step if choice.manifest else 0
            assert found >= committed, f"kill {kill}: step {committed} was committed, but {found} is the newest"
            if choice.folder is not None:
                assert all((choice.folder / name).read_bytes() == content(found, name) for name in NAMES)
            remote_newest = _check_store(store, kill, remote_newest, tmp_path)
        assert remote_newest > 0, "no upload was ever completed between the kills"
        _check_completion(store, root, tmp_path)
        assert committed > 10 * KILLS / 2, "the kills came too early to test anything"
    finally:
        worker.stdin.close()
        worker.wait(10)
        server.kill()


def _check_store(store: S3Store, kill: int, newest_before: int, tmp_path: Path) -> int:
    """Every tenth time: the newest in the store is whole and never goes back."""
    if kill % 10:
        return newest_before
    steps = store.steps()
    newest = max(steps, default=0)
    assert newest >= newest_before
    if newest:
        folder = catalog.fetch(store, newest, tmp_path / f"fetched-{kill}")
        assert all((folder / name).read_bytes() == content(newest, name) for name in NAMES)
    return newest


def _check_completion(store: S3Store, root: Path, tmp_path: Path) -> None:
    """The next process finishes what the killed ones left."""
    uploader = Uploader(store, root, lambda *event: None, first_wait_s=0.05)
    assert uploader.drain(30)
    uploader.close()
    assert pending(root) == []
    newest = catalog.newest_valid(root).manifest
    assert catalog.newest_valid(tmp_path / "empty", store).manifest == newest
