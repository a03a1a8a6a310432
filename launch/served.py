"""What already listens on the ports of `fab monitor`, asked by HTTP: so that an error can name it."""

from __future__ import annotations

import urllib.error
import urllib.request

from launch.monitor_files import Ports
from launch.node_facts import port_is_free

RECEIVER = "the receiver of alerts"
ANSWER_TIMEOUT_S = 2.0
# Name of the port -> what it is called, and the paths under which it may answer.
_KNOWN = {
    "prometheus": ("Prometheus", ("/prometheus/-/ready", "/-/ready")),
    "alertmanager": ("Alertmanager", ("/api/v2/status",)),
    "control": (RECEIVER, ("/",)),
    "grafana": ("Grafana", ("/api/health",)),
    "web": ("nginx before them", ("/healthz",)),
}
# The first words of the receiver's own page.
GREETING = "Loopworks receives alerts"


def served(ports: Ports) -> dict[int, str]:
    """Returns port -> what is there, for those of the ports that are taken."""
    return {port: describe(name, port) for name, port in vars(ports).items() if not port_is_free(port, "127.0.0.1")}


def describe(name: str, port: int) -> str:
    """Returns what listens on a port that is meant for `name`, for a person."""
    called, paths = _KNOWN[name]
    for path in paths:
        said = _answer(f"http://127.0.0.1:{port}{path}")
        if said is None or (name == "control" and not said.startswith(GREETING)):
            continue
        watches = said.removeprefix(GREETING).strip() if name == "control" else ""
        return f"{called}{' ' + watches if watches else ''}"
    return "another program"


def _answer(url: str) -> str | None:
    """Returns the beginning of what is answered; None for an error or no answer."""
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_TIMEOUT_S) as answer:
            return str(answer.read(500).decode("utf-8", "replace"))
    except (urllib.error.URLError, OSError, ValueError):
        return None
