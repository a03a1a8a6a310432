"""Run folders on the control side."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.errors import StorageError, UsageError
from launch.observe import follow, log_file, status, stop
from launch.processes import is_running, processes_of, start_time
from launch.runs import create_run, find_run, list_runs, observed_state
from launch.train import failure, helps_to_start_again
from training.config import load_config
from training.heartbeat import HEARTBEATS_VARIABLE, Pulse
from training.records import EventRecord, MetricsRecord, RankError, RunFolder


def make(tmp_path: Path, name: str, now: float = 0.0) -> RunFolder:
    config = load_config(None, [f"run.name={name}", f"run.dir={tmp_path}"])
    return create_run(config, {"plan": 1}, 10, now=now)


def record(step: int) -> MetricsRecord:
    return MetricsRecord(
        time=1.0, step=step, tokens=2, loss=None, grad_norm=1.0, learning_rate=0.1, recurrence=4, step_s=1,
        data_wait_s=0, tokens_per_s=5, flop_per_s=1e9, mfu_ratio=None,
    )  # fmt: skip


def test_run_folder_holds_configuration_plan_and_state(tmp_path: Path) -> None:
    run = make(tmp_path, "first")
    assert load_config(run.config).run.name == "first"
    assert run.read_state().phase == "starting"
    assert run.plan.is_file()


def test_taken_name_is_refused(tmp_path: Path) -> None:
    make(tmp_path, "first")
    with pytest.raises(UsageError, match="already a run"):
        make(tmp_path, "first")


def test_unwritable_place_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = load_config(None, ["run.name=x", f"run.dir={tmp_path / 'file'}"])
    with pytest.raises(StorageError, match="cannot write the run folder"):
        create_run(config, {}, None)


def test_runs_are_listed_newest_first_and_found_by_name(tmp_path: Path) -> None:
    make(tmp_path, "old", now=1.0)
    make(tmp_path, "new", now=2.0)
    (tmp_path / "not-a-run").mkdir()
    assert [run.name for run in list_runs(tmp_path)] == ["new", "old"]
    assert find_run(tmp_path, None).name == "new"
    assert find_run(tmp_path, "old").name == "old"
    with pytest.raises(UsageError, match="no run 'x'.*newest: new, old"):
        find_run(tmp_path, "x")
    with pytest.raises(UsageError, match="there are no runs"):
        find_run(tmp_path / "empty", None)


def test_run_whose_processes_are_gone_counts_as_failed(tmp_path: Path) -> None:
    run = make(tmp_path, "gone")
    run.update_state(launcher_pid=2**22 - 1, launcher_start=1.0)
    assert observed_state(run).phase == "failed"
    assert status(tmp_path)[0]["message"] == "its processes are gone"


def test_reused_process_id_is_not_the_run() -> None:
    assert is_running(os.getpid(), start_time(os.getpid()))
    assert not is_running(os.getpid(), start_time(os.getpid()) - 1000)


def test_stop_ends_every_process_of_the_run_and_no_other(tmp_path: Path) -> None:
    run, other = make(tmp_path, "one"), make(tmp_path, "other")
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code], env={**os.environ, "LOOPWORKS_RUN": str(folder.path)}, stdout=subprocess.PIPE
        )
        for folder in (run, run, other)
    ]
    try:
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()
        assert "had to be killed" in stop(run, grace_s=0.1)
        assert not processes_of(str(run.path))
        assert started[2].poll() is None
        assert "is not running" in stop(run)
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_first_error_of_any_rank_is_what_is_shown(tmp_path: Path) -> None:
    run = make(tmp_path, "failed")
    run.write_error(RankError(rank=0, time=20.0, cause="connection reset", exit_code=1, expected=False))
    run.write_error(RankError(rank=1, time=10.0, cause="no space", remedy="free some", exit_code=1, expected=True))
    error = failure(run, 1)
    assert str(error) == "rank 1: no space\n  next: free some"


def test_errors_that_are_cleared_during_the_look_are_left_out(tmp_path, monkeypatch):
    run = RunFolder(tmp_path)
    for rank in (0, 1):
        run.write_error(RankError(rank=rank, time=20.0, cause="x", exit_code=1, expected=False))
    read = Path.read_text

    def gone_before(path, **how):
        if path.name == "rank-0.json":
            path.unlink()
        return read(path, **how)

    monkeypatch.setattr(Path, "read_text", gone_before)
    assert [error.rank for error in run.read_errors()] == [1]


def test_half_written_lines_are_not_read(tmp_path: Path) -> None:
    run = make(tmp_path, "lines")
    run.append(record(1))
    run.append(EventRecord(time=0, kind="start", step=0, message="x"))
    with run.metrics.open("a") as file:
        file.write('{"step": 2, "to')
    assert [r.step for r in run.read_metrics()] == [1]
    assert run.read_events()[0].kind == "start"


def test_follow_ends_with_the_run_and_misses_nothing(tmp_path: Path) -> None:
    run = make(tmp_path, "live")
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        run.update_state(phase="training", launcher_pid=sleeper.pid, launcher_start=start_time(sleeper.pid))
        run.log.write_text("one\n")
        lines = follow(run.log, run, poll_s=0.01)
        assert next(lines) == "one\n"
        with run.log.open("a") as file:
            file.write("two\n")
        run.update_state(phase="finished")
        began = time.monotonic()
        assert list(lines) == ["two\n"]
        assert time.monotonic() - began < 10
    finally:
        sleeper.kill()
        sleeper.wait()


def test_missing_log_names_those_that_exist(tmp_path: Path) -> None:
    run = make(tmp_path, "quiet")
    run.update_state(phase="finished")
    run.rank_log(0).write_text("")
    with pytest.raises(UsageError, match=r"it has: rank-0\.log"):
        log_file(run, 3)


def broken(rank: int) -> RankError:
    cause = "RuntimeError: Read error [10.0.0.2]:1: Connection reset by peer"
    return RankError(rank=rank, time=1.0, cause=cause, exit_code=1, expected=False)


def test_a_rank_that_died_in_silence_comes_before_its_echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(tmp_path, "r")
    run.write_error(broken(0))
    assert "Connection reset" in failure(run, 1).cause, "nothing better is known"
    monkeypatch.delenv(HEARTBEATS_VARIABLE, raising=False)
    for rank in range(2):
        Pulse(run, rank).beat("training", 3)
    assert failure(run, 1).cause == "rank 1 died without a message (killed from outside?)"
    seen = "mpirun noticed that process rank {} with PID 0 on node gpu2 exited on signal {}.\n"
    (run.logs / "mpirun.log").write_text("noise\n" + seen.format(3, "11 (Segmentation fault)") + seen.format(5, "9"))
    assert failure(run, 1).cause == "rank 5 on gpu2 was ended by signal 9 (killed from outside?)"
    own = broken(1).model_copy(update={"cause": "ValueError: x", "time": 0.5})
    run.write_error(own)
    assert failure(run, 1).cause == "rank 1: ValueError: x"


def test_another_start_helps_unless_the_user_has_to_act(tmp_path: Path) -> None:
    run = make(tmp_path, "r")
    assert helps_to_start_again(run)
    run.write_error(broken(0))
    assert helps_to_start_again(run)
    run.write_error(broken(0).model_copy(update={"expected": True, "exit_code": 2}))
    assert not helps_to_start_again(run)
    run.clear_errors()
    run.update_state(phase="stopped")
    assert not helps_to_start_again(run)
