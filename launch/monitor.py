"""`fab monitor`: Prometheus and Alertmanager over the runs of this machine; Grafana and nginx where they are installed.

What is started listens on loopback, and ends with this command. Beside it, the state of the runs is served for
Prometheus as their folders and processes show it: that also tells of a run whose exporter is gone.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import get_args

from launch.errors import RunFailedError, UsageError
from launch.monitor_files import Layout, Ports, Program, cluster_of, programs, write_files
from launch.report_prometheus import ADDRESS_FILE
from launch.runs import LIVE, list_runs, observed_state
from launch.supervision import read_nodes, read_watch
from launch.webhook import Actions, Drainer, WebhookServer
from training.heartbeat import read_heartbeats
from training.records import Phase, RunFolder, RunState

READY_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0
POLL_S = 1.0
# Of ended runs only the latest are told: their number must not grow without bound.
SHOWN_RUNS, SHOWN_AGE_S = 20, 24 * 3600.0


def run_samples(folders: Iterable[tuple[RunFolder, RunState]], now: float) -> Iterator[str]:
    """Yields the lines that tell Prometheus of each run as its folder and processes show it.

    Those that go on, and of the others the newest ended within a day.
    """
    yield "# TYPE loopworks_run_phase gauge"
    yield "# TYPE loopworks_run_updated_timestamp_seconds gauge"
    yield "# TYPE loopworks_run_node_report_timestamp_seconds gauge"
    yield "# TYPE loopworks_run_heartbeat_timestamp_seconds gauge"
    shown = 0
    for folder, state in folders:
        live = state.phase in LIVE
        if not live and (shown >= SHOWN_RUNS or now - state.updated > SHOWN_AGE_S):
            continue
        shown += 1
        labels = f'cluster="{cluster_of(folder)}",run="{folder.name}"'
        for phase in get_args(Phase):
            yield f'loopworks_run_phase{{{labels},phase="{phase}"}} {int(state.phase == phase)}'
        yield f"loopworks_run_updated_timestamp_seconds{{{labels}}} {state.updated}"
        if live:
            yield from _node_samples(folder, labels)


def _node_samples(folder: RunFolder, labels: str) -> Iterator[str]:
    """Yields when each node of a run last reported, and the oldest heartbeat of its ranks.

    A run on nodes tells them in nodes/NODE.json, those of its present attempt; another one has its ranks' heartbeats in
    its folder, and is on this machine.
    """
    watch = read_watch(folder)
    if watch is None:
        beats = [(beat.phase, beat.time) for beat in read_heartbeats(folder.path / "heartbeats")]
        yield from _oldest_beat(beats, labels, socket.gethostname())
        return
    for name, node in read_nodes(folder, watch.attempt).items():
        if node.phase == "ended":
            continue  # says nothing any more, and need not
        yield f'loopworks_run_node_report_timestamp_seconds{{{labels},node="{name}"}} {node.time}'
        yield from _oldest_beat([(beat["phase"], beat["time"]) for beat in node.ranks], labels, name)


def _oldest_beat(beats: Iterable[tuple[str, float]], labels: str, node: str) -> Iterator[str]:
    times = [at for phase, at in beats if phase != "ended"]
    if times:
        yield f'loopworks_run_heartbeat_timestamp_seconds{{{labels},node="{node}"}} {min(times)}'


def control_page(runs_dir: Path) -> bytes:
    """Returns the metrics of the control side."""
    folders = [(folder, observed_state(folder)) for folder in list_runs(runs_dir)]
    lines = list(run_samples(folders, time.time()))
    if runs_dir.is_dir():
        disk = shutil.disk_usage(runs_dir)
        lines += [f"loopworks_runs_disk_free_bytes {disk.free}", f"loopworks_runs_disk_size_bytes {disk.total}"]
    return ("\n".join(lines) + "\n").encode()


def withdraw_dead_targets(runs_dir: Path) -> list[str]:
    """Removes the entries of runs that are gone (a rank 0 that was killed could not do it). Returns their names."""
    gone = []
    for entry in sorted((runs_dir / ".targets").glob("*.json")):
        folder = RunFolder(runs_dir / entry.stem)
        if not folder.path.is_dir() or observed_state(folder).phase not in LIVE:
            entry.unlink(missing_ok=True)
            gone.append(entry.stem)
    return gone


class Monitor:
    """Starts the programs and the receiver of alerts, watches them, and ends them again."""

    def __init__(self, layout: Layout, *, drainer: Drainer = "list", tell: Callable[[str], None] = print) -> None:
        self.layout, self._tell = layout, tell
        self._actions = Actions(layout.runs_dir, layout.state_dir, drainer, tell)
        self._server: WebhookServer | None = None
        self._children: list[tuple[Program, subprocess.Popen[bytes]]] = []

    def __enter__(self) -> Monitor:
        """Starts everything and waits until it answers. Raises LoopworksError; nothing stays behind then."""
        started = programs(self.layout)
        busy = [port for port in vars(self.layout.ports).values() if _is_taken(port)]
        if busy:
            raise UsageError(
                f"port {', '.join(map(str, busy))} is in use on this machine",
                "stop what listens there (another fab monitor?), or choose others with --port-base",
            )
        write_files(self.layout)
        try:
            self._serve()
            for program in started:
                self._start(program)
            for program, child in self._children:
                self._await(program, child)
            (self.layout.state_dir / ADDRESS_FILE).write_text(self.layout.prometheus_url + "\n", encoding="utf-8")
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Ends everything."""
        self.stop()

    def addresses(self) -> dict[str, str]:
        """Returns what answers where."""
        names = {program.name for program, _ in self._children}
        ports = self.layout.ports
        found = {
            "Prometheus": f"{self.layout.prometheus_url}/",
            "Alertmanager": f"http://127.0.0.1:{ports.alertmanager}/",
        }
        if "grafana" in names:
            found["Grafana"] = f"http://127.0.0.1:{ports.grafana}/"
        if "nginx" in names:
            found["All of it"] = f"http://127.0.0.1:{ports.web}/" + ("" if "grafana" in names else "prometheus/")
        return found

    def watch(self) -> None:
        """Looks after targets and programs until one of them ends (RunFailedError) or the user interrupts."""
        while True:
            self.poll()
            time.sleep(POLL_S)

    def poll(self) -> None:
        """One look: dead targets are withdrawn, a program that has ended is an error."""
        for name in withdraw_dead_targets(self.layout.runs_dir):
            self._tell(f"run {name} has ended")
        for program, child in self._children:
            if child.poll() is not None:
                raise RunFailedError(
                    f"{program.name} has ended with code {child.returncode}", f"see {self._log(program)}", 1
                )

    def stop(self) -> None:
        """Ends the programs, the last started first."""
        (self.layout.state_dir / ADDRESS_FILE).unlink(missing_ok=True)
        for _, child in reversed(self._children):
            if child.poll() is None:
                child.terminate()
        for _, child in self._children:
            try:
                child.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        self._children = []
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def _serve(self) -> None:
        import threading

        layout = self.layout
        self._server = WebhookServer(
            layout.ports.control,
            layout.state_dir / "alerts.jsonl",
            self._actions,
            self._tell,
            lambda path: control_page(layout.runs_dir) if path == "/metrics" else None,
        )
        threading.Thread(target=self._server.serve_forever, name="webhook", daemon=True).start()

    def _start(self, program: Program) -> None:
        with self._log(program).open("ab") as log:
            child = subprocess.Popen(
                (*_end_with_us(), *program.argv),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **program.env},
                start_new_session=True,
            )
        self._children.append((program, child))

    def _log(self, program: Program) -> Path:
        return self.layout.state_dir / "logs" / f"{program.name}.log"

    def _await(self, program: Program, child: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not _answers(program.ready):
            if child.poll() is not None or time.monotonic() > deadline:
                raise RunFailedError(f"{program.name} does not start", f"see {self._log(program)}", 1)
            time.sleep(0.05)


def run_monitor(layout: Layout, drainer: Drainer = "list", tell: Callable[[str], None] = print) -> None:
    """Starts everything, tells the addresses and each alert, and ends everything at Ctrl-C or SIGTERM.

    Raises LoopworksError when something cannot be started or ends by itself.
    """
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with Monitor(layout, drainer=drainer, tell=tell) as monitor:
            for name, address in monitor.addresses().items():
                tell(f"{name}: {address}")
            tell("watching; Ctrl-C ends it")
            monitor.watch()
    except KeyboardInterrupt:
        tell("ended")
    finally:
        signal.signal(signal.SIGTERM, before)


def monitor_layout(runs_dir: str, state_dir: str | None, port_base: int | None) -> Layout:
    """Returns the layout of `fab monitor`; with a port base the ports are that and the four after it."""
    runs = Path(runs_dir).absolute()
    state = Path(state_dir).absolute() if state_dir else runs / ".monitor"
    if port_base is None:
        return Layout(runs, state)
    if not 1024 <= port_base <= 65530:
        raise UsageError(
            f"--port-base {port_base}: choose a number from 1024 to 65530", "for example --port-base 19090"
        )
    return Layout(runs, state, Ports(*range(port_base, port_base + 5)))


def check_drainer(name: str) -> Drainer:
    """Returns the way to drain a node. Raises UsageError for one that is not known."""
    for known in get_args(Drainer):
        if name == known:
            return known  # type: ignore[no-any-return]
    raise UsageError(f"--drain {name}: there is no such way", f"choose one of {', '.join(get_args(Drainer))}")


def _end_with_us() -> tuple[str, ...]:
    """Returns what makes the kernel end a program when this process is killed and cannot do it (Linux)."""
    setpriv = shutil.which("setpriv")
    return () if setpriv is None else (setpriv, "--pdeathsig", "TERM", "--")


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def _answers(url: str) -> bool:
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except (urllib.error.URLError, OSError):
        return False
