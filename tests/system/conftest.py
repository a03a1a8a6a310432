"""Fixtures of the system tests: a small prepared dataset and a way to call fab as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
FAB = Path(sys.executable).with_name("fab")

# A model and a run that take seconds.
TINY = """
model: {{preset: null, vocab_size: 320, context_length: 32, width: 32, heads: 2, mlp_width: 64,
        prelude_layers: 1, core_layers: 1, coda_layers: 1, mean_recurrence: 3, backprop_depth: 2}}
data: {{path: {data}}}
training: {{batch_size: 8, max_steps: 6, learning_rate: 3e-3, precision: fp32}}
evaluation: {{recurrences: [1, 3], max_sequences: 8, sample_tokens: 4, prompt: "The "}}
monitoring: {{log_interval_steps: 1}}
run: {{dir: {runs}}}
"""

Fab = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def tiny_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of a few hundred sequences, made by the real pipeline from this project's own documents."""
    source, out = tmp_path_factory.mktemp("text"), tmp_path_factory.mktemp("data") / "tiny"
    for number, path in enumerate(sorted((CHECKOUT / "training").glob("*.py"))):
        (source / f"{number}.txt").write_text(path.read_text())
    command = [sys.executable, "-m", "training.data", "prepare", "--source", str(source), "--out", str(out)]
    command += ["--vocab-size", "320", "--seq-len", "32", "--workers", "1"]
    command += ["--set", "prepare.validation_fraction=0.2"]
    subprocess.run(command, cwd=CHECKOUT, check=True, timeout=120, capture_output=True)
    return out


@pytest.fixture
def tiny_config(tmp_path: Path, tiny_dataset: Path) -> Path:
    """A configuration that trains a tiny model on the tiny dataset, with its runs under tmp_path/runs."""
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY.format(data=tiny_dataset, runs=tmp_path / "runs"))
    return path


def fab_command(*arguments: str) -> list[str]:
    """The command line that a user would type."""
    return [str(FAB), *arguments]


@pytest.fixture
def fab() -> Fab:
    """Calls fab in the checkout and returns the completed process."""

    def call(*arguments: str, timeout_s: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            fab_command(*arguments),
            cwd=CHECKOUT,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    return call


@pytest.fixture(autouse=True)
def no_process_left_behind(tmp_path: Path) -> Iterator[None]:
    """Fails a test that leaves processes of its runs alive, and ends them."""
    yield
    left = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("LOOPWORKS_RUN", "").startswith(str(tmp_path)):
                left.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    for process in left:
        process.kill()
    assert not left, f"processes of the test's runs were still alive: {left}"
