"""What ranks do beside training: save on request, tell the pace of a node, name the run of a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.monitoring.tools import metrics_record
from training.callbacks import StepReport
from training.config.schema import MonitoringSection
from training.observers import JobMapping, PaceFile, SaveRequests, gpu_index, observers, save_request_file
from training.records import RunFolder


def test_a_request_for_a_checkpoint_is_passed_on_once(run: RunFolder) -> None:
    asked: list[str] = []
    requests = SaveRequests(run, asked.append)
    requests.on_step(StepReport(1, 10))
    save_request_file(run).write_text("SpotNotice\n")
    requests.on_step(StepReport(2, 10))
    requests.on_step(StepReport(3, 10))
    assert asked == ["SpotNotice"]


@pytest.mark.parametrize(
    ("changes", "ranks", "expected"),
    [
        ({}, (0, 0), ["SaveRequests", "CommunicationSampler", "Exporter"]),
        ({"communication_sampling": 0.0}, (0, 0), ["SaveRequests", "Exporter"]),
        ({"port": None}, (0, 0), ["SaveRequests"]),
        ({}, (8, 0), []),
        ({"textfile_dir": "x"}, (8, 0), ["CommunicationSampler", "PaceFile"]),
        ({"textfile_dir": "x"}, (9, 1), []),
        ({"job_mapping_dir": "/"}, (9, 1), ["JobMapping"]),
        ({"job_mapping_dir": "/not/there"}, (9, 1), []),
    ],
)
def test_observers_follow_configuration_and_rank(
    run: RunFolder, changes: dict[str, object], ranks: tuple[int, int], expected: list[str]
) -> None:
    section = MonitoringSection.model_validate(changes)
    found = observers(
        run, section, rank=ranks[0], local_rank=ranks[1], master="127.0.0.1", cuda=False, request_save=print
    )
    assert [type(callback).__name__ for callback in found] == expected


def test_a_nodes_own_pace_is_told_while_it_trains(tmp_path: Path) -> None:
    ratios: list[dict[str, float] | None] = [None, {"backward": 0.15, "other": 0.1}]
    pace = PaceFile(tmp_path, "r", lambda: ratios[0])
    pace.on_step(StepReport(1, 10, metrics_record(1, step_s=2.0)))
    assert not list(tmp_path.iterdir())
    ratios.pop(0)
    pace.on_step(StepReport(2, 10, metrics_record(2, step_s=2.0)))
    (file,) = tmp_path.iterdir()
    assert 'loopworks_node_busy_seconds{run="r"} 1.5' in file.read_text()
    pace.on_end()
    assert not list(tmp_path.iterdir())


def test_a_pace_that_cannot_be_written_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pace = PaceFile(tmp_path / "no folder", "r", lambda: {"other": 0.1})
    for step in (1, 2, 3):
        pace.on_step(StepReport(step, 10, metrics_record(step)))
    pace.on_end()
    assert caplog.text.count("is not told") == 1


@pytest.mark.parametrize(
    ("visible", "local_rank", "expected"),
    [(None, 3, "3"), ("", 3, "3"), ("4,5,6", 1, "5"), ("4, 5", 1, "5"), ("0", 1, None), ("GPU-8f3a,GPU-11", 0, None)],
)
def test_gpus_are_counted_as_dcgm_counts_them(visible: str | None, local_rank: int, expected: str | None) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert gpu_index(local_rank, environment) == expected


def test_a_gpu_is_mapped_to_its_run_while_that_goes_on(tmp_path: Path) -> None:
    (tmp_path / "2").write_text("a run that was killed\n")
    mapping = JobMapping(tmp_path, "2", "mine")
    mapping.on_start(0, 10)
    assert (tmp_path / "2").read_text() == "mine\n"
    assert [path.name for path in tmp_path.iterdir()] == ["2"]
    mapping.on_end()
    mapping.on_end()
    assert not list(tmp_path.iterdir())


def test_the_mapping_of_another_run_stays(tmp_path: Path) -> None:
    mapping = JobMapping(tmp_path, "2", "mine")
    mapping.on_start(0, 10)
    (tmp_path / "2").write_text("next\n")
    mapping.on_end()
    assert (tmp_path / "2").read_text() == "next\n"


def test_a_mapping_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "2").mkdir()
    for gpu in ("2", None):
        mapping = JobMapping(tmp_path, gpu, "mine")
        mapping.on_start(0, 10)
        mapping.on_end()
    assert caplog.text.count("do not name this run") == 2
