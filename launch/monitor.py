"""`fab monitor`: Prometheus and Alertmanager over the runs of this machine; Grafana and nginx where they are installed.

What is started listens on loopback, and ends with this command. The receiver of alerts (launch/receiver.py) is a part
of it. On the head of a cluster all of this is there as services.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

from launch.errors import RunFailedError, UsageError
from launch.monitor_files import Layout, Ports, Program, programs, write_files
from launch.receiver import POLL_S, Receiver, sigterm_interrupts
from launch.report_prometheus import ADDRESS_FILE
from launch.served import RECEIVER, served
from launch.webhook import Drainer

READY_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0


class Monitor:
    """Starts the programs and the receiver of alerts, watches them, and ends them again."""

    def __init__(self, layout: Layout, *, drainer: Drainer = "list", tell: Callable[[str], None] = print) -> None:
        self.layout, self._tell = layout, tell
        self._receiver = Receiver(layout, drainer, tell)
        self._children: list[tuple[Program, subprocess.Popen[bytes]]] = []

    def __enter__(self) -> Monitor:
        """Starts everything and waits until it answers. Raises LoopworksError; nothing stays behind then."""
        started = programs(self.layout)
        taken = served(self.layout.ports)
        if taken:
            raise already_served(taken)
        write_files(self.layout)
        try:
            self._receiver.start()
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
        self._receiver.poll()
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
        self._receiver.stop()

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
    try:
        with sigterm_interrupts(), Monitor(layout, drainer=drainer, tell=tell) as monitor:
            for name, address in monitor.addresses().items():
                tell(f"{name}: {address}")
            tell("watching; Ctrl-C ends it")
            monitor.watch()
    except KeyboardInterrupt:
        tell("ended")


def already_served(taken: dict[int, str]) -> UsageError:
    """Returns the error that names what listens on the ports; a head whose services do all this is told as such."""
    found = "".join(f"\n  - {port}: {what}" for port, what in taken.items())
    if any(what.startswith(RECEIVER) for what in taken.values()):
        return UsageError(
            f"this machine is monitored already:{found}",
            "use what is there (on a cluster's head it is a service, loopworks-alerts); for runs in another folder "
            "choose other ports, for example --port-base 19090",
        )
    return UsageError(
        f"ports are in use on this machine:{found}",
        "stop what listens there, or choose others with --port-base, for example --port-base 19090",
    )


def monitor_layout(runs_dirs: Sequence[str], state_dir: str | None, port_base: int | None) -> Layout:
    """Returns the layout of `fab monitor`; with a port base the ports are that and the four after it."""
    runs, *others = (Path(name).absolute() for name in runs_dirs)
    state = Path(state_dir).absolute() if state_dir else runs / ".monitor"
    if port_base is None:
        return Layout(runs, state, other_runs_dirs=tuple(others))
    if not 1024 <= port_base <= 65530:
        raise UsageError(
            f"--port-base {port_base}: choose a number from 1024 to 65530", "for example --port-base 19090"
        )
    return Layout(runs, state, Ports(*range(port_base, port_base + 5)), other_runs_dirs=tuple(others))


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


def _answers(url: str) -> bool:
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except (urllib.error.URLError, OSError):
        return False
