"""The exporter: what it tells, and that nothing outside can hold up or end a run."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.monitoring.tools import known_series, metrics_record, needs
from training import metrics_server
from training.callbacks import StepReport
from training.config.schema import MonitoringSection
from training.metrics import (
    RESTART_REASONS,
    STEP_PHASES,
    Exporter,
    phase_seconds,
    productive_seconds,
    restart_reasons,
    target_file,
)
from training.phases import PHASES
from training.records import EventRecord, RunFolder, RunState


def event(kind: str, at: float, **details: object) -> EventRecord:
    return EventRecord(time=at, kind=kind, step=1, message="", details=dict(details))


@pytest.fixture
def exporter(run: RunFolder) -> Iterator[Exporter]:
    made = Exporter(run, MonitoringSection(host="127.0.0.1"))
    made.on_start(0, 100)
    yield made
    made.on_end()


def page(exporter: Exporter) -> str:
    with urllib.request.urlopen(f"http://{exporter.address}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def sample(text: str, name: str) -> float | None:
    return next((float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{name} ")), None)


def labelled(text: str, name: str, label: str) -> dict[str, float]:
    lines = [line for line in text.splitlines() if line.startswith(f"{name}{{{label}=")]
    return {line.split('"')[1]: float(line.split()[-1]) for line in lines}


def test_numbers_of_a_run(exporter: Exporter, run: RunFolder) -> None:
    run.event("evaluation", 5, "", perplexity=8.0, perplexity_one=12.0, recurrence=4)
    run.event("nonfinite", 6, "")
    run.event("checkpoint", 7, "", stall_s=0.25, write_s=3.0)
    for step in range(1, 21):
        # The tenth step is ten times as slow: a mean over the interval would hide it.
        step_s = 1.0 if step == 10 else 0.08
        exporter.on_step(StepReport(step, 100, metrics_record(step) if step % 10 == 0 else None, step_s))
    text = page(exporter)
    assert sample(text, "train_step") == 20
    assert sample(text, "train_steps_total") == 20
    assert sample(text, "train_tokens_total") == pytest.approx(20 * 0.1 * 100)
    assert sample(text, "train_step_seconds_sum") == pytest.approx(1.0 + 19 * 0.08)
    assert sample(text, "train_step_seconds_count") == 20
    assert 'train_step_seconds_bucket{le="0.1"} 19.0' in text
    assert 'train_step_seconds_bucket{le="0.5"} 19.0' in text
    assert 'train_step_seconds_bucket{le="1.0"} 20.0' in text
    assert 'train_step_seconds_bucket{le="0.05"} 0.0' in text
    assert sample(text, "train_loss") == 2
    assert sample(text, "train_nonfinite_total") == 1
    assert sample(text, "train_checkpoint_stall_seconds") == 0.25
    assert sample(text, "train_checkpoint_write_seconds") == 3
    assert labelled(text, "train_perplexity", "recurrence") == {"4": 8.0, "1": 12.0}
    assert labelled(text, "train_phase", "phase")["training"] == 1
    phases = labelled(text, "train_phase_seconds_total", "phase")
    assert phases["data"] == pytest.approx(0.2)
    assert phases["forward"] == pytest.approx(0.6)
    assert phases["backward"] == pytest.approx(0.8)
    assert phases["optimizer"] == pytest.approx(0.2)
    assert sample(text, "train_productive_seconds") == pytest.approx(2.0)
    assert 100 <= (sample(text, "train_wall_seconds") or 0) < 160
    assert time.time() - (sample(text, "train_heartbeat_timestamp_seconds") or 0) < 30


def test_a_loss_that_is_not_finite_is_absent_not_nan(exporter: Exporter) -> None:
    exporter.on_step(StepReport(1, 100, metrics_record(1, loss=None, grad_norm=None, mfu_ratio=None)))
    text = page(exporter)
    assert sample(text, "train_loss") is None
    assert sample(text, "train_mfu_ratio") is None
    assert not any(line.lower().endswith("nan") for line in text.splitlines())


def test_names_types_and_labels_are_those_of_the_list(run: RunFolder) -> None:
    exporter = Exporter(run, MonitoringSection(host="127.0.0.1"), shares=lambda: {"backward": 0.1})
    exporter.on_start(0, 10)
    run.event("evaluation", 1, "", perplexity=8.0, recurrence=4)
    run.event("checkpoint", 1, "", stall_s=0.1, write_s=2.0)
    exporter.on_step(StepReport(1, 10, metrics_record(1)))
    text = page(exporter)
    exporter.on_end()
    told = dict(line.split()[2:4] for line in text.splitlines() if line.startswith("# TYPE"))
    assert told == {name: kind for name, kind in known_series().items() if name.startswith("train_")}
    assert set(labelled(text, "train_phase_seconds_total", "phase")) == set(STEP_PHASES)
    assert set(labelled(text, "train_restarts_total", "reason")) == set(RESTART_REASONS)


@needs("promtool")
def test_promtool_accepts_the_page(exporter: Exporter) -> None:
    exporter.on_step(StepReport(1, 100, metrics_record(1)))
    outcome = subprocess.run(
        ["promtool", "check", "metrics"], input=page(exporter), capture_output=True, text=True, timeout=30, check=False
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


def test_counts_survive_a_restart(exporter: Exporter, run: RunFolder) -> None:
    for kind in ("start", "out_of_memory", "start", "rollback", "start"):
        run.event(kind, 1, "")
    run.append(metrics_record(10))
    again = Exporter(run, MonitoringSection(host="127.0.0.1"))
    again.on_start(10, 100)
    text = page(again)
    again.on_end()
    assert labelled(text, "train_restarts_total", "reason") == {
        "out_of_memory": 1,
        "failure": 1,
        "stopped": 0,
        "interrupt": 0,
    }
    assert sample(text, "train_rollbacks_total") == 1
    assert sample(text, "train_productive_seconds") == pytest.approx(1.0)


def test_the_entry_for_discovery_comes_and_goes(run: RunFolder) -> None:
    exporter = Exporter(run, MonitoringSection(host="127.0.0.1", cluster="c1"))
    exporter.on_start(0, 10)
    (entry,) = json.loads(target_file(run).read_text())
    assert entry["targets"] == [exporter.address]
    assert entry["labels"] == {"cluster": "c1", "run": "a", "node": socket.gethostname()}
    exporter.on_end()
    assert not target_file(run).exists()
    assert exporter.address is None
    exporter.on_end()


def test_a_taken_port_is_a_warning_and_training_goes_on(run: RunFolder, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, caplog.at_level(logging.WARNING, "training"):
        exporter = Exporter(run, MonitoringSection(host="127.0.0.1", port=other.getsockname()[1]))
        exporter.on_start(0, 10)
        exporter.on_step(StepReport(1, 10, metrics_record(1)))
        exporter.on_end()
    assert exporter.address is None
    assert "training goes on" in caplog.text
    assert not target_file(run).exists()


def test_auto_takes_another_port_when_the_usual_one_is_taken(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setattr("training.metrics.DEFAULT_PORT", other.getsockname()[1])
        exporter = Exporter(run, MonitoringSection(host="127.0.0.1"))
        exporter.on_start(0, 10)
        assert sample(page(exporter), "train_planned_steps") == 10
        exporter.on_end()


def test_hanging_clients_hold_up_neither_steps_nor_scrapes_for_long(
    exporter: Exporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_server._Handler, "timeout", 0.3)
    host, port = (exporter.address or "").split(":")
    hanging = [socket.create_connection((host, int(port))) for _ in range(3 * metrics_server.MAX_CLIENTS)]
    began = time.perf_counter()
    for step in range(1, 1001):
        exporter.on_step(StepReport(step, 1000, None))
    assert time.perf_counter() - began < 1
    deadline = time.monotonic() + 20
    while True:
        try:
            assert sample(page(exporter), "train_step") == 1000
            break
        except OSError:
            assert time.monotonic() < deadline, "the hanging clients were not dropped"
            time.sleep(0.05)
    for client in hanging:
        client.close()


def test_a_broken_page_is_that_answers_alone(
    exporter: Exporter, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> RunState:
        raise RuntimeError("broken")

    monkeypatch.setattr(run, "read_state", broken)
    with pytest.raises((urllib.error.URLError, ConnectionError)):
        page(exporter)
    exporter.on_step(StepReport(1, 100, metrics_record(1)))
    monkeypatch.undo()
    assert sample(page(exporter), "train_steps_total") == 1


def test_a_folder_that_cannot_be_written_is_a_warning(run: RunFolder, caplog: pytest.LogCaptureFixture) -> None:
    (run.path.parent / ".targets").write_text("a file where the folder should be")
    exporter = Exporter(run, MonitoringSection(host="127.0.0.1"))
    with caplog.at_level(logging.WARNING, "training"):
        exporter.on_start(0, 10)
        assert sample(page(exporter), "train_planned_steps") == 10
        exporter.on_end()
    assert "will not find this run" in caplog.text


def test_other_paths_are_not_found(exporter: Exporter) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"http://{exporter.address}/admin", timeout=5)


def test_exposed_communication_is_taken_from_the_phase_it_is_in() -> None:
    shares = {"data": 0.5, "forward": 0.05, "backward": 0.2, "optimizer": 0.9, "other": 0.02}
    found = phase_seconds(metrics_record(10, step_s=1.0), 10, 10.0, shares, [])
    assert found == pytest.approx(
        {
            # Waiting for data is waiting for data, whatever goes on in the network meanwhile.
            "data": 1.0,
            "forward": 2.5,
            "backward": 2.0,
            # A phase cannot wait for longer than it takes.
            "optimizer": 0.0,
            "communication": 0.5 + 2.0 + 1.0 + 0.2,
            "checkpoint": 0.0,
            "evaluation": 0.0,
            "other": 0.8,
        }
    )


def test_restarts_are_told_by_what_ended_the_attempt_before() -> None:
    kinds = ["start", "checkpoint", "start", "stopped", "start", "out_of_memory", "start"]
    assert restart_reasons([event(kind, 0.0) for kind in kinds]) == {"failure": 1, "stopped": 1, "out_of_memory": 1}


def test_steps_done_again_count_once() -> None:
    once = [metrics_record(step, step_s=1.0) for step in (10, 20, 30)]
    assert productive_seconds(once) == 30
    assert productive_seconds([*once, metrics_record(20, step_s=2.0), metrics_record(30, step_s=2.0)]) == pytest.approx(
        10 + 20 + 20
    )


@given(
    step_s=st.floats(0.001, 100),
    steps=st.integers(1, 50),
    parts=st.lists(st.floats(0, 1), min_size=4, max_size=4),
    shares=st.dictionaries(st.sampled_from([*PHASES, "other"]), st.floats(0, 1)),
    between=st.floats(0, 1000),
    stall=st.floats(0, 100),
    evaluated=st.booleans(),
)
def test_phases_add_up_to_the_time(
    step_s: float,
    steps: int,
    parts: list[float],
    shares: dict[str, float],
    between: float,
    stall: float,
    evaluated: bool,
) -> None:
    events = [event("checkpoint", 1.0, stall_s=stall), *([event("evaluation", 1.0)] if evaluated else [])]
    elapsed = steps * step_s + between
    names = ("data_wait_s", "forward_s", "backward_s", "optimizer_s")
    measured = metrics_record(
        steps, step_s=step_s, **{name: part * step_s for name, part in zip(names, parts, strict=True)}
    )
    found = phase_seconds(measured, steps, elapsed, shares, events)
    assert set(found) == set(STEP_PHASES)
    assert all(seconds >= -1e-9 for seconds in found.values())
    assert sum(found.values()) == pytest.approx(elapsed)
