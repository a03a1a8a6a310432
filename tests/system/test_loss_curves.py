"""Twenty steps give the same losses whatever the ZeRO stage, the number of ranks, the micro-batch and checkpointing."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.system.torchrun import torchrun

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
    (folder / "logs").mkdir(parents=True)
    output = torchrun("curves_worker.py", ranks, json.dumps(layouts), str(steps), str(folder))
    results = [json.loads(line.removeprefix("RESULT ")) for line in output.splitlines() if line.startswith("RESULT ")]
    return {result["label"]: result for result in results}


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("curves")
    results = run(2, TWO_RANKS, STEPS, folder / "two")
    return results | run(1, {"one rank": []}, STEPS, folder / "one")


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
