"""Weights out and back in: a run that starts from an export has the perplexity that the exported run ended with."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.system.conftest import CHECKOUT, TINY, Fab, fab_command

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, tiny_dataset: Path) -> tuple[Path, Path, dict[str, float]]:
    """A trained run: the folder of the runs, the dataset, and the run's perplexities."""
    place = tmp_path_factory.mktemp("source")
    config = place / "tiny.yaml"
    config.write_text(TINY.format(data=tiny_dataset, runs=place / "runs"))
    command = fab_command("train", "--config", str(config), "--name", "source", "--json")
    outcome = subprocess.run(command, cwd=CHECKOUT, check=True, capture_output=True, text=True, timeout=120)
    return place / "runs", tiny_dataset, json.loads(outcome.stdout)["perplexity"]


@pytest.mark.parametrize("form", ["safetensors", "hf"])
def test_run_that_starts_from_an_export_continues_its_perplexity(
    fab: Fab, source: tuple[Path, Path, dict[str, float]], tmp_path: Path, form: str
) -> None:
    runs, dataset, before = source
    folder, config = tmp_path / "weights", tmp_path / "imported.yaml"
    exported = fab("export", "--run", "source", "--dir", str(runs), "--format", form, "--to", str(folder), "--json")
    assert exported.returncode == 0, exported.stderr
    assert Path(json.loads(exported.stdout)["folder"]) == folder
    assert (folder / "tokenizer.json").is_file()

    # A learning rate of almost zero: what is evaluated are the imported weights.
    overrides = [f"data.path={dataset}", f"run.dir={tmp_path / 'runs'}", "training.batch_size=8"]
    overrides += ["training.max_steps=1", "training.warmup_steps=0", "training.cooldown_steps=0"]
    overrides += ["training.learning_rate=1e-12", "training.weight_decay=0", "training.precision=fp32"]
    overrides += ["evaluation.recurrences=[1, 3]", "evaluation.max_sequences=8", "evaluation.sample_tokens=0"]
    arguments = [word for override in overrides for word in ("--set", override)]
    imported = fab("import", "--source", str(folder), "--to", str(config), *arguments)
    assert imported.returncode == 0, imported.stderr
    again = fab("train", "--config", str(config), "--name", "again", "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["perplexity"] == pytest.approx(before, rel=1e-5)


def test_weights_of_another_shape_are_refused(
    fab: Fab, source: tuple[Path, Path, dict[str, float]], tmp_path: Path
) -> None:
    runs, dataset, _ = source
    folder, config = tmp_path / "weights", tmp_path / "imported.yaml"
    assert fab("export", "--run", "source", "--dir", str(runs), "--to", str(folder)).returncode == 0
    overrides = ("--set", f"data.path={dataset}", "--set", f"run.dir={tmp_path / 'runs'}")
    assert fab("import", "--source", str(folder), "--to", str(config), *overrides).returncode == 0
    other = fab("train", "--config", str(config), "--name", "other", "--set", "model.mlp_width=128")
    assert other.returncode == 2
    assert "model.mlp_width is 128, there 64" in other.stderr


def test_folder_without_weights_is_refused(fab: Fab, tmp_path: Path) -> None:
    outcome = fab("import", "--source", str(tmp_path), "--to", str(tmp_path / "x.yaml"))
    assert outcome.returncode == 2
    assert "config.json" in outcome.stderr
    assert not (tmp_path / "x.yaml").exists()
