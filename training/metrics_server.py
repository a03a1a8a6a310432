"""The HTTP side of the exporter: answers GET /metrics in threads of its own, bounded in number and time."""

from __future__ import annotations

import logging
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

log = logging.getLogger("training")

CLIENT_TIMEOUT_S = 5.0
MAX_CLIENTS = 8
# How soon the server notices that it shall end.
POLL_S = 0.1


class MetricsServer(ThreadingHTTPServer):
    """Answers GET /metrics. Bounded: so many clients at once, so many seconds for each."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 16

    def __init__(self, address: tuple[str, int], page: Callable[[], bytes]) -> None:
        self.page = page
        self._slots = threading.BoundedSemaphore(MAX_CLIENTS)
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._slots.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """One answer fails and the run goes on; Prometheus sees the target as down."""
        foreseen = isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError))
        log.log(logging.DEBUG if foreseen else logging.WARNING, "a metrics request failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: MetricsServer
    timeout = CLIENT_TIMEOUT_S

    def do_GET(self) -> None:
        if self.path.split("?")[0] not in ("/", "/metrics"):
            self.send_error(404)
            return
        page = self.server.page()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the base class's name)
        log.debug(format, *args)


def open_server(host: str, ports: Iterable[int], page: Callable[[], bytes]) -> MetricsServer | None:
    """Starts to serve `page` at the first of `ports` that is free (0: any); None, with a warning, when none is."""
    reason = "no port was given"
    for port in ports:
        try:
            server = MetricsServer((host, port), page)
        except OSError as error:
            reason = f"{host}:{port}: {error.strerror or error}"
            continue
        threading.Thread(target=server.serve_forever, args=(POLL_S,), name="metrics", daemon=True).start()
        return server
    log.warning("no metrics are served (%s); training goes on; see monitoring.port and monitoring.host", reason)
    return None


def own_address(master: str) -> str:
    """Returns this machine's address on the way to `master`, the node that the ranks meet at."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Sends nothing: connecting a datagram socket only looks up the route.
            probe.connect((master, 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
