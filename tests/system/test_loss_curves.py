"""Twenty steps give the same losses whatever the ZeRO stage, the number of ranks, the micro-batch and checkpointing."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.system.torchrun import torchrun
from training.records import RunFolder

pytestmark = pytest.mark.system

STEPS = 20
TOLERANCE = 1e-4
TWO_RANKS: dict[str, list[str]] = {
    "stage 1": ["distributed.zero_stage=1"],
    "stage 0": ["distributed.zero_stage=0"],
    "stage 2": ["distributed.zero_stage=2"],
    "stage 3": ["distributed.zero_stage=3"],
    "checkpointing": ["training.activation_checkpointing=per_iteration"],
    "accumulation": ["training.micro_batch_size=1"],
    "stage 3, checkpointing, accumulation": [
        "distributed.zero_stage=3",
        "training.activation_checkpointing=per_iteration",
        "training.micro_batch_size=2",
    ],
}
POISONED = {
    f"poisoned stage {stage} {precision}": [f"distributed.zero_stage={stage}", f"training.precision={precision}"]
    for stage in (0, 1, 2, 3)
    for precision in ("fp32", "bf16")
}


def run(ranks: int, layouts: dict[str, list[str]], steps: int, folder: Path) -> dict[str, Any]:
    output = torchrun("curves_worker.py", ranks, json.dumps(layouts), str(steps), str(folder))
    results = [json.loads(line.removeprefix("RESULT ")) for line in output.splitlines() if line.startswith("RESULT ")]
    return {result["label"]: result for result in results}


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("curves")
    results = run(2, TWO_RANKS, STEPS, folder / "two")
    return results | run(1, {"one rank": []}, STEPS, folder / "one")


@pytest.fixture(scope="module")
def bad_data(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], RunFolder]:
    folder = tmp_path_factory.mktemp("bad") / "run"
    results = run(2, {"bad data": ["checkpoint.interval_steps=3"]}, STEPS, folder)
    return results["bad data"], RunFolder(folder / "0")


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(2, POISONED, 6, tmp_path_factory.mktemp("poisoned") / "run")


@pytest.mark.parametrize("label", [*list(TWO_RANKS)[1:], "one rank"])
def test_losses_agree_with_stage_1_on_two_ranks(curves: dict[str, Any], label: str) -> None:
    reference, other = curves["stage 1"], curves[label]
    assert len(reference["losses"]) == STEPS
    assert reference["losses"][-1] < reference["losses"][0] - 1, "the reference did not learn: nothing is compared"
    for step, (wanted, found) in enumerate(zip(reference["losses"], other["losses"], strict=True)):
        assert abs(wanted - found) < TOLERANCE, f"step {step}"
    assert other["perplexity"] == pytest.approx(reference["perplexity"], rel=TOLERANCE)
    assert other["cursor"] == reference["cursor"]


@pytest.mark.parametrize("label", POISONED)
def test_nan_on_one_rank_is_skipped_by_all(poisoned: dict[str, Any], label: str) -> None:
    result = poisoned[label]
    assert result["skipped"] == 1
    finite = [loss is not None and math.isfinite(loss) for loss in result["losses"]]
    assert finite == [True, True, False, True, True, True]
    assert math.isfinite(result["perplexity"])
    # Weights and moments are unharmed: the loss goes on falling after the skipped step.
    assert result["losses"][-1] < result["losses"][1]


def test_bad_data_is_left_out_after_going_back(bad_data: tuple[dict[str, Any], RunFolder]) -> None:
    result, folder = bad_data
    (event,) = [event for event in folder.read_events() if event.kind == "rollback"]
    # Batches of 8: steps 11 to 14 read positions 80 to 111. The last save before them is of step 9.
    assert "went back to step 9" in event.message
    assert "sequences 80 to 111" in event.message
    assert (result["rollbacks"], result["skips"]) == (1, [[80, 112]])
    losses = result["losses"]
    assert [index + 1 for index, loss in enumerate(losses) if loss is None] == [11, 12, 13, 14]
    # Steps 10 to 20 again, without the bad data: 14 steps before, 11 after.
    assert len(losses) == 14 + 11
    assert losses[-1] < losses[9]
    # 20 batches of 8 and the 32 sequences left out, in epochs of 60.
    assert result["cursor"] == [3, 12]
