"""What `fab train` answers to input that it cannot use: one message with cause and next step, exit code 2."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.conftest import Fab

pytestmark = pytest.mark.system

ONE_GPU = """#!/bin/sh
echo "NVIDIA A100-SXM4-80GB, 81920, 8.0"
"""


def assert_refused(outcome: subprocess.CompletedProcess[str], *words: str) -> None:
    text = outcome.stdout + outcome.stderr
    assert outcome.returncode == 2, text
    assert outcome.stderr.startswith("error: "), text
    assert "\n  next: " in outcome.stderr
    assert "Traceback" not in text
    for word in words:
        assert word in outcome.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["the file is empty"]),
        ("training:\n\tbatch_size: 1\n", ["line 2", "tab"]),
        ("training: {batch_size: [1, 2]}\n", ["line 1", "training.batch_size", "a list"]),
        ("training: {batch_size: 33}\n", ["33 sequences cannot be shared evenly by 2 ranks", "32 or 34"]),
        ("model: {preset: huge}\n", ["there is no preset 'huge'", "huginn-3.5b"]),
        ("training: {batchsize: 32}\n", ["did you mean 'batch_size'"]),
        ("data: {path: /nowhere/at/all}\n", ["no prepared dataset", "fab data.prepare"]),
        ("distributed: {backend: nccl}\n", ["nccl needs an NVIDIA GPU"]),
    ],
)
def test_configuration_that_cannot_be_used(fab: Fab, tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    assert_refused(fab("train", "--config", str(path), "--set", f"run.dir={tmp_path / 'runs'}"), *words)
    assert not (tmp_path / "runs").exists()


def test_missing_configuration_file(fab: Fab, tmp_path: Path) -> None:
    assert_refused(fab("train", "--config", str(tmp_path / "absent.yaml")), "absent.yaml")


def test_more_ranks_than_gpus(fab: Fab, tiny_config: Path, tmp_path: Path) -> None:
    # The driver's tool is the one part that stands for a GPU here.
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(ONE_GPU)
    tool.chmod(0o755)
    path = f"{tool.parent}:{os.environ['PATH']}"
    outcome = fab("train", "--config", str(tiny_config), "--set", "distributed.ranks_per_node=4", PATH=path)
    assert_refused(outcome, "4 ranks on", "which has 1 GPU(s)")


def test_unknown_node_is_not_silently_ignored(fab: Fab, tiny_config: Path) -> None:
    outcome = fab("train", "--config", str(tiny_config), "--nodes", "gpu1.invalid,gpu2.invalid")
    assert outcome.returncode == 3, outcome.stderr
    assert "Traceback" not in outcome.stderr
    for name in ("gpu1.invalid", "gpu2.invalid"):
        assert f"{name}: unreachable" in outcome.stderr


def test_unknown_run_and_rank(fab: Fab, tmp_path: Path) -> None:
    for arguments in (["logs"], ["stop"], ["generate", "--prompt", "x"], ["logs", "--rank", "x"]):
        assert_refused(fab(*arguments, "--dir", str(tmp_path)))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 300 kB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(place)], check=True)
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_full_disk_at_the_start(fab: Fab, tiny_config: Path, small_disk: Path) -> None:
    filler = os.open(small_disk / "filler", os.O_WRONLY | os.O_CREAT)
    with pytest.raises(OSError, match="No space"):
        while True:
            os.write(filler, b"x" * 4096)
    os.close(filler)
    outcome = fab("train", "--config", str(tiny_config), "--set", f"run.dir={small_disk / 'runs'}")
    assert_refused(outcome, "cannot write the run folder", "No space left")


def test_full_disk_during_the_run(fab: Fab, tiny_config: Path, small_disk: Path) -> None:
    # The run folder fits, checkpoint and model do not.
    arguments = ["--set", f"run.dir={small_disk / 'runs'}", "--set", "model.mlp_width=2048", "--name", "full"]
    outcome = fab("train", "--config", str(tiny_config), *arguments)
    assert_refused(outcome, "o space left")
    assert not list((small_disk / "runs" / "full" / "models").glob("step-*"))


def test_read_only_place(fab: Fab, tiny_config: Path, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    outcome = fab("train", "--config", str(tiny_config), "--set", f"run.dir={small_disk / 'runs'}")
    assert_refused(outcome, "cannot write the run folder", "Read-only")


def test_no_write_permission(fab: Fab, tiny_config: Path, tmp_path: Path) -> None:
    # Permission bits do not stop root, so the place is one where nobody may make a folder.
    place = "/proc/runs" if os.geteuid() == 0 else str(tmp_path / "locked" / "runs")
    if os.geteuid() != 0:
        (tmp_path / "locked").mkdir(mode=0o500)
    outcome = fab("train", "--config", str(tiny_config), "--set", f"run.dir={place}")
    assert_refused(outcome, "cannot write the run folder")
