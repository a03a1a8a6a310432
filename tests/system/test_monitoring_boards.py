"""Every expression of the dashboards returns data on a real Prometheus that holds every series of the list."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from launch.monitor import Monitor
from launch.monitor_files import Layout
from tests.system.monitoring_live import fast_layout, query, wait_for
from tests.unit.monitoring.expressions import board_expressions, rule_names
from tests.unit.monitoring.tools import known_series, needs

pytestmark = [pytest.mark.system, needs("prometheus", "prometheus-alertmanager")]

LABELS = {
    "train_phase": 'phase="training"',
    "train_phase_seconds_total": 'phase="communication"',
    "train_perplexity": 'recurrence="4"',
    "train_restarts_total": 'reason="failure"',
    "loopworks_run_phase": 'phase="training"',
    "loopworks_queue_jobs": 'state="waiting"',
    "loopworks_health_check_status": 'check="disk"',
    "loopworks_gpu_xid_total": 'gpu="0",xid="31",class="application"',
    "node_cpu_seconds_total": 'cpu="0",mode="idle"',
    "node_filesystem_avail_bytes": 'mountpoint="/",fstype="ext4"',
    "node_filesystem_size_bytes": 'mountpoint="/",fstype="ext4"',
}


def seed_page(began: float) -> bytes:
    """Returns a page with each series of the list: gauges stand, counters grow."""
    lines = []
    for name, kind in known_series().items():
        if name in ("up", "ALERTS") or name.startswith("prometheus_"):
            continue
        labels = ",".join(filter(None, ['cluster="c",run="r",node="n"', LABELS.get(name, "")]))
        labels += ',gpu="0"' if name.startswith("DCGM") else ""
        if kind == "histogram":
            lines += [f'{name}_bucket{{{labels},le="{le}"}} {time.time() - began}' for le in ("1", "+Inf")]
            lines += [f"{name}_{part}{{{labels}}} {time.time() - began}" for part in ("sum", "count")]
        else:
            lines.append(f"{name}{{{labels}}} {time.time() - began if kind == 'counter' else 1}")
    return ("\n".join(lines) + "\n").encode()


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Layout]:
    """A Prometheus that scrapes every series there is."""
    root, began = tmp_path_factory.mktemp("boards"), time.time()

    class Seed(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(seed_page(began))

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Seed)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    made = fast_layout(root / "runs", root / "state")
    try:
        with Monitor(made, tell=lambda _: None):
            address = f"127.0.0.1:{server.server_address[1]}"
            state, node = made.state_dir / "targets", {"cluster": "c", "node": "n"}
            for entry, labels in {
                made.runs_dir / ".targets" / "r.json": {"cluster": "c", "run": "r"},
                state / "node" / "n.json": node,
                state / "gpu" / "n.json": node,
            }.items():
                entry.write_text(json.dumps([{"targets": [address], "labels": labels}]))
            yield made
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def seeded(layout: Layout) -> Layout:
    """The same, when the recording rules have had the samples they need."""
    wait_for(lambda: all(query(layout, name) for name in rule_names()), "data in all recording rules")
    return layout


def test_each_panel_has_data(seeded: Layout) -> None:
    empty = []
    for where, expression in board_expressions():
        if not query(seeded, re.sub(r"\$(cluster|run|node)", ".*", expression)):
            empty.append(f"{where}: {expression}")
    assert not empty


def test_a_panel_without_data_would_be_seen(seeded: Layout) -> None:
    assert query(seeded, "train_loss_of_another_name") == []
