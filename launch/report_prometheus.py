"""What Prometheus adds to the page of a run: GPUs, power, network and exposed communication over the run's time."""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.errors import UsageError
from launch.report_plots import Series

TIMEOUT_S = 20.0
# Prometheus takes no more than 11,000; a plot cannot show more than some hundred.
MAX_POINTS = 400
MIN_STEP_S = 15.0
ADDRESS_FILE = "prometheus.url"


@dataclass(frozen=True)
class Plot:
    """A plot that Prometheus can fill: (legend, PromQL); $S stands for the selector of the run."""

    title: str
    queries: tuple[tuple[str, str], ...]


def _over_nodes(series: str) -> tuple[tuple[str, str], ...]:
    by_node = f"avg by (cluster, node) ({series}{{$S}})"
    return (
        ("mean", f"avg({series}{{$S}})"),
        ("lowest node", f"min({by_node})"),
        ("highest node", f"max({by_node})"),
    )


def _of_members(expression: str) -> str:
    """Returns the mean over the nodes that the run uses of something that is known by node."""
    return f"avg(node_run:member{{$S}} * on (cluster, node) group_left () {expression})"


def _ethernet(direction: str) -> str:
    return _of_members(f"sum by (cluster, node) (rate(node_network_{direction}_bytes_total[5m]))")


PLOTS = (
    Plot("GPU utilisation, %", _over_nodes("DCGM_FI_DEV_GPU_UTIL")),
    Plot("Tensor pipe active, share of cycles", _over_nodes("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE")),
    Plot("Power of all GPUs, W", (("power", "sum(DCGM_FI_DEV_POWER_USAGE{$S})"),)),
    Plot(
        "Fabric, bytes a second and node",
        (
            ("sent", _of_members("node:fabric_transmit:rate5m")),
            ("received", _of_members("node:fabric_receive:rate5m")),
        ),
    ),
    Plot(
        "Ethernet, bytes a second and node (no RDMA traffic)",
        (("sent", _ethernet("transmit")), ("received", _ethernet("receive"))),
    ),
    Plot("Exposed communication, share of time", (("share", 'run:phase:ratio5m{$S, phase="communication"}'),)),
)


def selector(cluster: str, run: str) -> str:
    """Returns the label matchers of a run."""
    return ", ".join(f"{name}={json.dumps(value)}" for name, value in (("cluster", cluster), ("run", run)))


def read_plots(url: str, cluster: str, run: str, begin: float, end: float) -> list[tuple[str, list[Series]]]:
    """Returns (title, lines) of the plots that there is data for; times in hours after `begin` (unix, as `end`).

    Raises UsageError when Prometheus does not answer as it should.
    """
    step_s = max(MIN_STEP_S, (end - begin) / MAX_POINTS)
    chosen = selector(cluster, run)
    found = []
    for plot in PLOTS:
        lines = []
        for legend, query in plot.queries:
            answer = _query_range(url, query.replace("$S", chosen), begin, end, step_s)
            lines += [Series(legend, points(result["values"], begin, step_s)) for result in answer[:1]]
        if lines:
            found.append((plot.title, lines))
    return found


def points(values: Sequence[Sequence[Any]], begin: float, step_s: float) -> list[tuple[float, float | None]]:
    """Returns (hours, value) of a range's [time, text] pairs; a gap where samples are missing."""
    made: list[tuple[float, float | None]] = []
    before: float | None = None
    for at, text in values:
        if before is not None and at - before > 1.5 * step_s:
            made.append(((before + step_s - begin) / 3600, None))
        value = float(text)
        made.append(((at - begin) / 3600, value if math.isfinite(value) else None))
        before = float(at)
    return made


def monitor_address(runs_dir: Path) -> str | None:
    """Returns the Prometheus of a `fab monitor` over these runs; None when none is running."""
    try:
        return (runs_dir / ".monitor" / ADDRESS_FILE).read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


def _query_range(url: str, query: str, begin: float, end: float, step_s: float) -> list[dict[str, Any]]:
    data = urllib.parse.urlencode({"query": query, "start": begin, "end": end, "step": step_s}).encode()
    address = f"{url.rstrip('/')}/api/v1/query_range"
    try:
        with urllib.request.urlopen(urllib.request.Request(address, data), timeout=TIMEOUT_S) as answer:
            result: list[dict[str, Any]] = json.load(answer)["data"]["result"]
            return result
    except (urllib.error.URLError, OSError, ValueError, KeyError, TypeError) as error:
        reason = getattr(error, "reason", error)
        raise UsageError(
            f"no answer of Prometheus at {address}: {reason}",
            "give its address with --prometheus, for example http://127.0.0.1:9090/prometheus, or leave it out",
        ) from None
