"""The control side's view of checkpoints."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from moto import mock_aws

from launch import checkpoints
from launch.checkpoints import fetch_checkpoint, list_checkpoints, prune_checkpoints
from launch.errors import UsageError
from training.checkpoint import layout
from training.checkpoint.settings import describe_interval, interval, open_store
from training.checkpoint.verify import verify
from training.config import RunConfig, dump_config
from training.errors import ConfigError
from training.records import RunFolder


def _make(root: Path, step: int, loss: float | None = None) -> Path:
    staged = layout.stage(root, step)
    (staged / "data.pt").write_bytes(b"x" * 100)
    files = {"data.pt": layout.hash_file(staged / "data.pt")}
    manifest = layout.Manifest(step, 2, 1, "bf16", 0, 0, "c", "t", 1000.0 + step, evaluation_loss=loss, files=files)
    return layout.commit(staged, root, manifest)


def _run(tmp_path: Path, **checkpoint: object) -> RunFolder:
    folder = tmp_path / "runs" / "demo"
    folder.mkdir(parents=True)
    config = RunConfig.model_validate({"checkpoint": checkpoint})
    (folder / "config.resolved.yaml").write_text(dump_config(config))
    return RunFolder(folder)


@pytest.fixture
def store(tmp_path, monkeypatch):
    for name, value in {
        "AWS_ACCESS_KEY_ID": "k",
        "AWS_SECRET_ACCESS_KEY": "s",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    with mock_aws():
        run = _run(tmp_path, remote="s3://ckpts/team", keep_last=1, keep_best=0)
        from training.config import load_config

        store = open_store(load_config(run.config).checkpoint, "demo")
        store._client.create_bucket(Bucket="ckpts")
        yield run, store


def test_the_listing_says_step_age_size_world_state_and_place(tmp_path):
    run = _run(tmp_path)
    for step in (10, 20, 30):
        _make(run.checkpoints, step, loss=2.0)
    (run.checkpoints / "step-00000020" / "data.pt").write_bytes(b"y" * 100)
    (run.checkpoints / "step-00000030" / "COMMIT").unlink()
    layout.stage(run.checkpoints, 40)
    listing = list_checkpoints(run, now=1070.0)
    assert [(row.step, row.state) for row in listing.rows] == [
        (10, "ok"),
        (20, "ok"),
        (30, "damaged"),
        (40, "unfinished"),
    ]
    first = listing.rows[0]
    assert (first.age_s, first.size_bytes, first.world_size, first.zero_stage, first.place) == (60, 100, 2, 1, "local")
    deep = list_checkpoints(run, deep=True)
    assert [row.state for row in deep.rows] == ["verified", "damaged", "damaged", "unfinished"]
    assert "data.pt" in deep.rows[1].detail
    assert not deep.all_sound
    assert deep.rows[0].as_json()["evaluation_loss"] == 2.0


def test_one_that_retention_removes_while_it_is_verified_is_no_damaged_one(tmp_path, monkeypatch):
    run = _run(tmp_path)
    for step in (10, 20):
        _make(run.checkpoints, step)

    def gone_before(folder, *, deep):
        if layout.parse_step(folder.name) == 10:
            shutil.rmtree(folder)
        return verify(folder, deep=deep)

    monkeypatch.setattr(checkpoints, "verify", gone_before)
    listing = list_checkpoints(run)
    assert [(row.step, row.state) for row in listing.rows] == [(20, "ok")]
    assert listing.all_sound


def test_local_and_remote_are_merged(store):
    run, remote = store
    remote.upload(_make(run.checkpoints, 10))
    elsewhere = _make(run.path / "other", 20)
    remote.upload(elsewhere)
    _make(run.checkpoints, 30)
    listing = list_checkpoints(run)
    assert [(row.step, row.place) for row in listing.rows] == [(10, "both"), (20, "remote"), (30, "local")]


def test_a_store_that_refuses_becomes_a_note(store):
    run, remote = store
    _make(run.checkpoints, 10)
    remote._client.delete_bucket(Bucket="ckpts")
    listing = list_checkpoints(run)
    assert len(listing.rows) == 1
    assert "no bucket ckpts" in listing.notes[0]


def test_fetch_takes_the_newest_or_the_one_asked_for(store):
    run, remote = store
    for step in (10, 20):
        remote.upload(_make(run.path / "other", step))
    assert fetch_checkpoint(run).name == "step-00000020"
    assert fetch_checkpoint(run, 10).name == "step-00000010"
    with pytest.raises(UsageError, match="step 15 is not in"):
        fetch_checkpoint(run, 15)


def test_fetch_without_a_store_says_how(tmp_path):
    with pytest.raises(UsageError) as caught:
        fetch_checkpoint(_run(tmp_path))
    assert "checkpoint.remote" in caught.value.remedy


def test_prune_plans_first_and_leaves_what_waits_for_its_upload(store):
    run, remote = store
    for step in (10, 20, 30):
        folder = _make(run.checkpoints, step)
        if step != 20:
            remote.upload(folder)
    planned = prune_checkpoints(run, dry_run=True)
    assert planned == [(10, "local"), (10, "remote")]
    assert len(list_checkpoints(run).rows) == 3
    assert prune_checkpoints(run) == planned
    assert [(row.step, row.place) for row in list_checkpoints(run).rows] == [(20, "local"), (30, "both")]


def test_prune_with_another_rule(tmp_path):
    run = _run(tmp_path, keep_last=5, keep_best=0)
    for step in (10, 20, 30):
        _make(run.checkpoints, step)
    assert prune_checkpoints(run) == []
    assert prune_checkpoints(run, keep_last=2) == [(10, "local")]


def test_the_interval_of_the_plan():
    section = RunConfig.model_validate({"checkpoint": {"interval_steps": "auto"}}).checkpoint
    chosen = interval(section, ranks=1024, stall_s=20.0)
    assert chosen.seconds / 60 == pytest.approx(44, abs=1)  # 1,024 devices: a failure in 48.8 h
    assert "between failures" in describe_interval(section, 1024)
    minutes = RunConfig.model_validate({"checkpoint": {"interval_minutes": 15}}).checkpoint
    assert interval(minutes, 8).seconds == 900
    assert describe_interval(minutes, 8) == "every 15 min"
    steps = RunConfig.model_validate({"checkpoint": {"interval_steps": 500}}).checkpoint
    assert describe_interval(steps, 8) == "every 500 steps"
    never = RunConfig.model_validate({"checkpoint": {"interval_steps": None}}).checkpoint
    assert describe_interval(never, 8) == "at the end only"


@pytest.mark.parametrize(
    "bad",
    [
        "remote=https://bucket/x",
        "remote=s3://key:secret@bucket/x",
        "endpoint_url=http://user:pass@host",
        "endpoint_url=host:9000",
        "upload_part_mib=1",
        "spike_ratio=1.0",
    ],
)
def test_settings_that_cannot_work_are_refused(bad):
    from training.config import load_config

    with pytest.raises(ConfigError):
        load_config(None, [f"checkpoint.{bad}"])


def test_two_intervals_are_refused():
    from training.config import load_config

    with pytest.raises(ConfigError, match="keep one of them"):
        load_config(None, ["checkpoint.interval_steps=5", "checkpoint.interval_minutes=5"])


def test_the_listing_needs_neither_torch_nor_boto3():
    import subprocess

    code = "import sys, launch.checkpoints; sys.exit(any(m in sys.modules for m in ('torch', 'boto3', 'deepspeed')))"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=Path(__file__).parents[3]).returncode == 0
