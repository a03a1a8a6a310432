"""What a plan says of the future: measured, computed from a stated assumption, or not known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from launch.estimate import ASSUMED_MFU, outlook, resume_point, step_time
from launch.machine import Gpu, MachineFacts
from launch.plan import RunPlan, build_plan
from launch.present import print_plan
from launch.runs import create_run
from tests.unit.launch.test_checkpoints import _make as checkpoint
from tests.unit.launch.test_runs import record
from training.config import RunConfig, load_config
from training.records import RunFolder

LAPTOP = MachineFacts("laptop", cpu_count=2, memory_bytes=8 * 2**30, cpu_bf16=False)


def config(folder: Path, *overrides: str) -> RunConfig:
    return load_config(None, [f"run.dir={folder}", "training.max_steps=10", *overrides])


def former(folder: Path, plan: RunPlan, name: str, step_s: tuple[float, ...]) -> RunFolder:
    run = create_run(config(folder, f"run.name={name}"), plan.as_json(), 10)
    for number, seconds in enumerate(step_s):
        run.append(record(number).model_copy(update={"step_s": seconds}))
    return run


def test_step_time_is_that_of_a_former_run_that_was_planned_alike(tmp_path: Path) -> None:
    wanted = config(tmp_path)
    plan = build_plan(wanted, [LAPTOP])
    assert outlook(wanted, plan, None).step_time.seconds is None
    other = build_plan(config(tmp_path, "training.batch_size=64"), [LAPTOP])
    former(tmp_path, other, "other", (9.0, 9.0))
    former(tmp_path, plan, "short", (9.0,))
    former(tmp_path, replace(plan, nodes=(replace(plan.nodes[0], name="elsewhere"),)), "same", (8.0, 8.0, 0.5, 0.5))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.resolved.yaml").write_text("")
    found = outlook(wanted, plan, None)
    assert found.step_time.seconds == 0.5
    assert "same" in found.step_time.source
    assert found.run_s == pytest.approx(5.0)


def test_on_a_known_gpu_it_follows_from_flop_and_the_assumption_is_said(tmp_path: Path) -> None:
    h100 = Gpu("NVIDIA H100 80GB HBM3", 80 * 2**30, (9, 0))
    plan = build_plan(config(tmp_path), [MachineFacts("n", 8, 2**36, True, (h100,) * 8)])
    found = step_time(plan, [])
    assert plan.peak_flop_per_s == 8 * 989e12
    assert found.seconds == pytest.approx(plan.flop_per_token * plan.tokens_per_step / (ASSUMED_MFU * 8 * 989e12))
    assert "ASSUMED MFU of 35% of 8 x 989 TFLOP/s" in found.source
    odd = Gpu("Oddity 9", 2**35, (9, 0))
    unknown = step_time(build_plan(config(tmp_path), [MachineFacts("n", 8, 2**36, True, (odd,) * 8)]), [])
    assert (unknown.seconds, "the GPU's peak is not known" in unknown.source) == (None, True)


def test_resume_takes_the_newest_that_verifies_and_names_those_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = config(tmp_path, "run.name=r")
    run = create_run(wanted, {}, 10)
    none = resume_point(run, wanted)
    assert (none.path, none.step) == (None, 0)
    for step in (2, 4, 6):
        checkpoint(run.checkpoints, step)
    (run.checkpoints / "step-00000006" / "data.pt").write_bytes(b"y" * 100)
    (run.checkpoints / "step-00000004" / "COMMIT").unlink()
    found = resume_point(run, wanted)
    assert (found.step, found.state) == (2, "verified")
    assert found.path == str(run.checkpoints / "step-00000002")
    assert len(found.passed_over) == 2
    plan = build_plan(wanted, [LAPTOP])
    expected = outlook(wanted, plan, run)
    print_plan(plan, (), expected)
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "not known" in shown
    assert "step 2 (" in shown
    assert "passed over" in shown
    assert json.loads(json.dumps(expected.as_json()))["resume"]["step"] == 2
