"""The receiver of alerts with the page about runs: a part of `fab monitor`, and alone a service of a cluster's head."""

from __future__ import annotations

import errno
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from launch.errors import UsageError
from launch.monitor_files import Layout
from launch.run_metrics import control_page, withdraw_dead_targets
from launch.served import GREETING, describe
from launch.webhook import Actions, Drainer, WebhookServer

POLL_S = 1.0


class Receiver:
    """Takes Alertmanager's messages, serves the state of the runs, and takes the targets of dead runs away."""

    def __init__(self, layout: Layout, drainer: Drainer, tell: Callable[[str], None]) -> None:
        self.layout, self._tell = layout, tell
        self._actions = Actions(layout.runs_dirs, layout.state_dir, drainer, tell)
        self._server: WebhookServer | None = None
        self._trouble = ""

    def start(self) -> None:
        """Listens from now on. Raises UsageError when the port is taken or the folder cannot be written."""
        layout, port = self.layout, self.layout.ports.control
        try:
            layout.state_dir.mkdir(parents=True, exist_ok=True)
            self._server = WebhookServer(port, layout.state_dir / "alerts.jsonl", self._actions, self._tell, self._page)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise UsageError(
                    f"port {port} is in use on this machine: {describe('control', port)}",
                    "stop what listens there (a fab monitor?), or choose others with --port-base",
                ) from None
            raise UsageError(f"cannot write {layout.state_dir}: {error.strerror}", "name another --state") from None
        threading.Thread(target=self._server.serve_forever, name="webhook", daemon=True).start()

    def poll(self) -> None:
        """Takes the targets of dead runs away. A folder that cannot be read or written now is told once."""
        try:
            for name in withdraw_dead_targets(self.layout.runs_dirs):
                self._tell(f"run {name} has ended")
            self._trouble = ""
        except OSError as error:
            trouble = f"cannot look after {error.filename}: {error.strerror}"
            if trouble != self._trouble:
                self._tell(trouble)
            self._trouble = trouble

    def stop(self) -> None:
        """Listens no more."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def _page(self, path: str) -> bytes | None:
        if path == "/metrics":
            return control_page(self.layout.runs_dirs)
        return f"{GREETING} {watched(self.layout)}\n".encode() if path == "/" else None


def watched(layout: Layout) -> str:
    """Returns which runs are looked after and where what is recorded lies, for a person."""
    return f"for runs in {', '.join(map(str, layout.runs_dirs))}; what comes is in {layout.state_dir}"


def run_receiver(layout: Layout, drainer: Drainer = "list", tell: Callable[[str], None] = print) -> None:
    """Receives alerts until Ctrl-C or SIGTERM, and starts nothing else. Raises UsageError when it cannot listen."""
    receiver = Receiver(layout, drainer, tell)
    with sigterm_interrupts():
        try:
            receiver.start()
            tell(f"receives alerts at http://127.0.0.1:{layout.ports.control}/ {watched(layout)}")
            tell_service_manager("READY=1")
            while True:
                receiver.poll()
                time.sleep(POLL_S)
        except KeyboardInterrupt:
            tell("ended")
        finally:
            receiver.stop()


def tell_service_manager(state: str) -> None:
    """Tells systemd of a service of Type=notify; does nothing outside of one (sd_notify(3))."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
            # A leading @ stands for the zero byte of an abstract address.
            connection.connect("\0" + address[1:] if address.startswith("@") else address)
            connection.sendall(state.encode())


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """SIGTERM ends what is inside as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
