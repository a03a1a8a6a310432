"""Weights out and back in: a run that starts from an export has the perplexity that the exported run ended with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.system.conftest import Fab

pytestmark = pytest.mark.system


@pytest.mark.parametrize("form", ["safetensors", "hf"])
def test_run_that_starts_from_an_export_continues_its_perplexity(
    fab: Fab, tiny_config: Path, tmp_path: Path, form: str
) -> None:
    runs, folder, config = str(tmp_path / "runs"), tmp_path / "weights", tmp_path / "imported.yaml"
    trained = fab("train", "--config", str(tiny_config), "--name", "source", "--json")
    assert trained.returncode == 0, trained.stderr
    exported = fab("export", "--run", "source", "--dir", runs, "--format", form, "--to", str(folder), "--json")
    assert exported.returncode == 0, exported.stderr
    assert Path(json.loads(exported.stdout)["folder"]) == folder
    assert (folder / "tokenizer.json").is_file()

    # A learning rate of almost zero: what is evaluated are the imported weights.
    tiny = [line for line in tiny_config.read_text().splitlines() if line.startswith(("data:", "run:"))]
    overrides = [f"data.path={tiny[0].split('path: ')[1].rstrip('}')}", f"run.dir={runs}", "training.batch_size=8"]
    overrides += ["training.max_steps=1", "training.warmup_steps=0", "training.cooldown_steps=0"]
    overrides += ["training.learning_rate=1e-12", "training.weight_decay=0", "training.precision=fp32"]
    overrides += ["evaluation.recurrences=[1, 3]", "evaluation.max_sequences=8", "evaluation.sample_tokens=0"]
    arguments = [word for override in overrides for word in ("--set", override)]
    imported = fab("import", "--source", str(folder), "--to", str(config), *arguments)
    assert imported.returncode == 0, imported.stderr
    again = fab("train", "--config", str(config), "--name", "again", "--json")
    assert again.returncode == 0, again.stderr
    before, after = json.loads(trained.stdout)["perplexity"], json.loads(again.stdout)["perplexity"]
    assert after == pytest.approx(before, rel=1e-5)

    other = fab("train", "--config", str(config), "--name", "other", "--set", "model.mlp_width=128")
    assert other.returncode == 2
    assert "model.mlp_width is 128, there 64" in other.stderr


def test_folder_without_weights_is_refused(fab: Fab, tmp_path: Path) -> None:
    outcome = fab("import", "--source", str(tmp_path), "--to", str(tmp_path / "x.yaml"))
    assert outcome.returncode == 2
    assert "config.json" in outcome.stderr
    assert not (tmp_path / "x.yaml").exists()
