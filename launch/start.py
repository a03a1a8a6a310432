"""`fab train`, `fab attach`, `fab stop`, `fab resume` over nodes: what the tasks call."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any, Protocol

from launch import supervision as sv
from launch.cluster import ClusterRequest, PreparedCluster, prepare_again, prepare_cluster
from launch.errors import RunFailedError, UsageError
from launch.mpi import PreparedMpirun, send_to_all, under_mpirun, under_mpirun_again
from launch.nodes import is_local
from launch.observe import stop as stop_here
from launch.preflight import Finding, PreflightError
from launch.processes import is_running
from launch.remote import CHECKOUT, NODE_ROOT, ask_agent, checkout_files, pack, shell_path
from launch.request import PreparedRun, TrainRequest, prepare_demo, prepare_run, resumable_run
from launch.runs import create_run, reopen_run
from launch.ssh import HostError, Remote, on_all
from launch.supervisor import CODE_ARCHIVE, STOP_GRACE_S
from launch.train import disk_is_full, storage_full, train
from launch.view import RunView, look
from training.drain import drain_mark, drain_reason
from training.errors import EXIT_FAILED, EXIT_INTERRUPTED
from training.records import RunFolder

POLL_S = 0.3


class Screen(Protocol):
    """Where a run is shown."""

    def line(self, text: str) -> None:
        """Shows a line of a log."""

    def now(self, view: RunView) -> None:
        """Shows how the run is, in place of what was shown before."""

    def close(self) -> None:
        """Leaves the last view standing and draws no more."""


def prepare(request: TrainRequest, cluster: ClusterRequest, dry_run: bool = False) -> PreparedRun:
    """Plans a run here or on nodes. Raises UsageError, ConfigError and PreflightError."""
    here = is_local(cluster.nodes) and cluster.inventory is None
    run = resumable_run(request) if here and cluster.nodes is None and request.resume is not None else None
    if run is not None and is_elsewhere(run):
        if cluster != ClusterRequest():
            cause = "--resume without --nodes goes on as the run was started; other options for nodes do not fit"
            raise UsageError(cause, "name the nodes too, or leave those options out")
        return prepare_as_before(request, run, writes=not dry_run)
    if here:
        refuse_when_drained()
    prepared = prepare_run(request) if here else prepare_cluster(request, cluster, writes=not dry_run)
    return under_mpirun(prepared, cluster) if cluster.backend == "mpirun" else prepared


def is_elsewhere(run: RunFolder) -> bool:
    """True for a run that was started on nodes or by mpirun."""
    return sv.read_settings(run) is not None or sv.read_mpirun(run) is not None


def prepare_as_before(request: TrainRequest, run: RunFolder, writes: bool = True) -> PreparedRun:
    """Plans how a run goes on where, and by what, it was started. Raises UsageError, ConfigError, PreflightError."""
    if (settings := sv.read_settings(run)) is not None:
        return prepare_again(request, settings, writes)
    if (mpirun := sv.read_mpirun(run)) is not None:
        return under_mpirun_again(request, mpirun, writes)
    refuse_when_drained()
    return prepare_run(request)


def refuse_when_drained() -> None:
    """Raises PreflightError when this machine has the drain mark."""
    if (reason := drain_reason(drain_mark())) is not None:
        remedy = f"once it may train again, remove {drain_mark()}"
        raise PreflightError([Finding("drained", "this machine", "fail", f"it is drained: {reason}", remedy)])


def start(request: TrainRequest, cluster: ClusterRequest, prepared: PreparedRun, screen: Screen) -> dict[str, Any]:
    """Runs what was prepared to its end and returns its result. Raises LoopworksError."""
    if not (prepared.dataset_dir / "manifest.json").is_file():
        prepare_demo(prepared.config, prepared.dataset_dir, console=request.console)
        prepared = prepare(request, cluster)
    if isinstance(prepared, PreparedMpirun):
        send_to_all(prepared)
    if not isinstance(prepared, PreparedCluster):
        return train(request, prepared)
    for finding in prepared.findings:
        if finding.level == "warn":
            screen.line(f"preflight: {finding.node}: {finding.check}: {finding.message}")
    make = create_run if prepared.folder is None else reopen_run
    run = make(prepared.config, prepared.plan_file(), prepared.plan.total_steps)
    (run.path / CODE_ARCHIVE).write_bytes(pack(CHECKOUT, checkout_files()))
    for left in ("supervision.json", *(f"nodes/{name}.json" for name in prepared.settings.facts)):
        (run.path / left).unlink(missing_ok=True)
    prepared.remember(run)
    start_supervisor(run)
    return attach(run, screen)


def resume(run: RunFolder, screen: Screen) -> dict[str, Any]:
    """Goes on with a run that ended, on the nodes it had. Raises LoopworksError."""
    directory = f"run.dir={json.dumps(str(run.path.parent))}"
    request = TrainRequest(resume=run.name, overrides=(directory,))
    return start(request, ClusterRequest(), prepare_as_before(request, run), screen)


def start_supervisor(run: RunFolder) -> None:
    """Starts the process that watches the run; it outlives this one and its terminal."""
    with (run.logs / "supervisor.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "launch.supervisor", str(run.path)],
            cwd=CHECKOUT,
            env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    deadline = time.monotonic() + 30
    while (watch := sv.read_watch(run)) is None or watch.pid != process.pid:
        if process.poll() is not None or time.monotonic() > deadline:
            raise RunFailedError(
                f"the supervisor of {run.name} did not start", f"read {run.logs / 'supervisor.log'}", EXIT_FAILED
            )
        time.sleep(0.02)
    # It goes on by itself: not waiting for it is what is wanted.
    process.returncode = 0


def is_watched(run: RunFolder) -> bool:
    """True when a supervisor is alive."""
    watch = sv.read_watch(run)
    return watch is not None and watch.phase != "ended" and is_running(watch.pid, watch.start)


def attach(run: RunFolder, screen: Screen) -> dict[str, Any]:
    """Shows the run until it ends and returns its result; starts a supervisor when there is none.

    Raises RunFailedError with the run's own exit code, or when Ctrl-C detaches.
    """
    if sv.read_settings(run) is None:
        raise UsageError(f"run {run.name} is not a run on nodes", f"follow it with: fab logs --run {run.name} --follow")
    watch = sv.read_watch(run)
    try:
        if not is_watched(run) and (watch is None or watch.phase != "ended"):
            start_supervisor(run)
        _show(run, screen)
    except KeyboardInterrupt:
        remedy = f"come back: fab attach --run {run.name}; end it: fab stop --run {run.name}"
        raise RunFailedError("detached; the run goes on", remedy, EXIT_INTERRUPTED) from None
    return outcome(run)


def outcome(run: RunFolder) -> dict[str, Any]:
    """Returns the result of an ended run. Raises RunFailedError with what made it end before."""
    watch = sv.read_watch(run)
    if watch is not None and watch.code == 0:
        return dict(json.loads(run.result.read_text(encoding="utf-8")))
    if watch is None or watch.code is None:
        if disk_is_full(run):
            raise storage_full(run)
        cause = f"run {run.name}: its supervisor is gone; the run itself may go on"
        raise RunFailedError(cause, f"watch it again: fab attach --run {run.name}", EXIT_FAILED)
    raise RunFailedError(
        f"run {run.name}: {watch.message}", watch.remedy or f"the whole story is in {run.logs}", watch.code
    )


def _show(run: RunFolder, screen: Screen) -> None:
    """Shows new lines of rank 0's log and what the supervisor does, until it has ended."""
    tails = [_Tail(run, "train.log"), _Tail(run, "supervisor.log")]
    try:
        while True:
            over = not is_watched(run)
            for tail in tails:
                for line in tail.lines():
                    screen.line(line)
            if over:
                return
            watch = sv.read_watch(run)
            if watch is not None:
                screen.now(look(run, watch))
            time.sleep(POLL_S)
    finally:
        screen.close()


class _Tail:
    """The lines that a log has gained since the last look."""

    def __init__(self, run: RunFolder, name: str) -> None:
        self._path = run.logs / name
        self._at = 0

    def lines(self) -> list[str]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._at)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._at += len(whole)
        return whole.decode(errors="replace").splitlines()


def stop(run: RunFolder, grace_s: float = STOP_GRACE_S) -> str:
    """Asks all ranks to save and leave, ends what is left on any node, and says what happened.

    Raises RunFailedError when something of the run may still be running.
    """
    settings = sv.read_settings(run)
    if settings is None:
        return stop_here(run)
    watch = sv.read_watch(run)
    if watch is None or watch.phase == "ended":
        return f"run {run.name} is not running"
    run.event("stop_requested", run.read_state().step, "fab stop")
    remotes = {name: Remote(settings.node(name), settings.ssh_config) for name in watch.active}
    if not is_watched(run):
        start_supervisor(run)

    def act(action: str) -> dict[str, Any]:
        def ask(remote: Remote) -> dict[str, Any]:
            facts = settings.facts[remote.node.name]
            code = settings.code.replace("~", facts["home"], 1)
            folder = f"{NODE_ROOT.replace('~', facts['home'], 1)}/runs/{run.name}/attempt-{watch.attempt}"
            return ask_agent(remote, facts["python"], code, action, folder, str(run.path), 30.0)

        return on_all(list(remotes.values()), ask)

    act("stop")
    deadline = time.monotonic() + grace_s
    while is_watched(run) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    answers = act("end")
    unsure = [f"{name}: {answer.cause}" for name, answer in answers.items() if isinstance(answer, HostError)]
    unsure += [
        f"{name}: {answer['left']}" for name, answer in answers.items() if isinstance(answer, dict) and answer["left"]
    ]
    for remote in remotes.values():
        remote.close()
    if unsure:
        raise RunFailedError(
            f"run {run.name} was stopped, but not seen to have ended on all nodes: {'; '.join(unsure)}",
            "a node that cannot be reached ends its ranks by itself; call fab stop again when it answers",
            EXIT_FAILED,
        )
    killed = sum(answer["found"] for answer in answers.values() if isinstance(answer, dict))
    ended = f"; {killed} process(es) had to be ended" if killed else ""
    return f"run {run.name} has stopped; nothing of it is left on {', '.join(answers)}{ended}"


def node_log(run: RunFolder, name: str, last_lines: int = 200) -> str:
    """Returns what torchrun and the agent of the newest attempt said on a node. Raises UsageError and HostError."""
    settings, watch = sv.read_settings(run), sv.read_watch(run)
    if settings is None or watch is None or name not in settings.facts:
        known = ", ".join(settings.facts) if settings is not None else "none: it ran on this machine"
        raise UsageError(f"run {run.name} has no node {name!r} (it has: {known})", "choose one of those with --node")
    home = settings.facts[name]["home"]
    folder = f"{NODE_ROOT.replace('~', home, 1)}/runs/{run.name}/attempt-{watch.attempt}"
    remote = Remote(settings.node(name), settings.ssh_config)
    try:
        return remote.run(f"cd {shell_path(folder)} && tail -n {last_lines} torchrun.log agent.log").text
    finally:
        remote.close()
