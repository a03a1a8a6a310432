"""Series of 512 nodes x 8 GPUs on paper, and Prometheus with a stated fraction of them for real.

    python -m benchmarks.series [--nodes 32] [--seconds 40]

Writes pages as the exporters of `--nodes` healthy nodes would (monitoring/series.yaml, with the labels of a
p5.48xlarge: 192 processors, 32 EFA devices, 8 GPUs), lets a real Prometheus with the project's configuration and rules
scrape them, and prints the bytes of a scrape, the series, resident memory and how long the rules take, next to what the
whole cluster makes of it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.machine import description
from launch.monitor import Monitor
from launch.monitor_files import MONITORING, Layout, Ports

NODES, GPUS, EFA, CPUS, DISKS, CHECKS = 512, 8, 32, 192, 10, 10
PORT_BASE = 19600


_DISK = [f'mountpoint="/mnt{number}",fstype="ext4",device="nvme{number}"' for number in range(DISKS)]
_DEVICE = [f'device="nvme{number}"' for number in range(DISKS)]
_MODES = ("idle", "iowait", "user", "system", "nice", "irq", "softirq", "steal")
# Label sets that one node has for the series with this beginning; the first that fits counts.
LABELS = {
    "DCGM": [f'gpu="{n}",Hostname="h",UUID="u{n}",modelName="H100",hpc_job="r"' for n in range(GPUS)],
    "loopworks_fabric": [f'device="rdmap{number}",port="1",kind="efa"' for number in range(EFA)],
    "loopworks_health_check_status": [f'check="check{number}"' for number in range(CHECKS)],
    "loopworks_gpu_xid_total": [],  # appears with an XID
    "node_cpu_seconds_total": [f'cpu="{cpu}",mode="{mode}"' for cpu in range(CPUS) for mode in _MODES],
    "node_filesystem": _DISK,
    "node_network": _DEVICE,
    "node_disk": _DEVICE,
    "node_textfile_mtime_seconds": ['file="/var/lib/loopworks_node.prom"'],
}
# What a healthy node says: series whose value is not 0.
VALUES = {
    "DCGM_FI_DEV_GPU_UTIL": 97.0,
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": 0.97,
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": 0.4,
    "DCGM_FI_DEV_SM_CLOCK": 1980.0,
    "loopworks_fabric_up": 1.0,
    "loopworks_fabric_rate_bytes_per_second": 12.5e9,
    "loopworks_node_busy_seconds": 1.0,
    "node_filesystem_avail_bytes": 5e11,
    "node_filesystem_size_bytes": 1e12,
}
GROWING = ("bytes_total", "cpu_seconds_total")


def labels_of(name: str) -> list[str]:
    """Returns the label sets that one node has for a series."""
    return next((labels for beginning, labels in LABELS.items() if name.startswith(beginning)), [""])


def value_of(name: str) -> float:
    """Returns what a healthy node says now."""
    if name.endswith(GROWING):
        return round(time.time() % 1e6, 3)
    return time.time() if name == "node_textfile_mtime_seconds" else VALUES.get(name, 0.0)


def node_page(origins: tuple[str, ...]) -> tuple[bytes, int]:
    """Returns what the exporters of a node say, and the number of its samples."""
    known = yaml.safe_load((MONITORING / "series.yaml").read_text(encoding="utf-8"))
    lines = [
        f"{name}{{{labels}}} {value_of(name)}" if labels else f"{name} {value_of(name)}"
        for origin in origins
        for name in known[origin]
        for labels in labels_of(name)
    ]
    return ("\n".join(lines) + "\n").encode(), len(lines)


def serve(pages: dict[str, tuple[str, ...]]) -> ThreadingHTTPServer:
    """Serves /ORIGIN/NODE for any node; values change with time."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        cache: dict[str, tuple[float, bytes]] = {}  # noqa: RUF012 (shared on purpose: the pages of all nodes are alike)

        def do_GET(self) -> None:
            origin = self.path.split("/")[1]
            made, page = self.cache.get(origin, (0.0, b""))
            if time.time() - made > 1:
                page = node_page(pages[origin])[0]
                self.cache[origin] = (time.time(), page)
            self.send_response(200)
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def ask(layout: Layout, expression: str) -> float:
    """Returns the value of an expression; 0 when it has none."""
    data = urllib.parse.urlencode({"query": expression}).encode()
    with urllib.request.urlopen(f"{layout.prometheus_url}/api/v1/query", data, timeout=30) as answer:
        found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return float(found[0]["value"][1]) if found else 0.0


def main() -> None:
    """Prints arithmetic and measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=40.0)
    options = parser.parse_args()
    pages = {"node": ("node_exporter", "textfile"), "gpu": ("dcgm",)}
    print(description())
    for origin, parts in pages.items():
        page, samples = node_page(parts)
        print(f"{origin}: {samples:,} samples, {len(page) / 1024:.0f} KiB a scrape, before the filters")
    server = serve(pages)
    with tempfile.TemporaryDirectory() as folder:
        layout = Layout(
            Path(folder) / "runs", Path(folder) / "state", Ports(*range(PORT_BASE, PORT_BASE + 5)), scrape_interval="5s"
        )
        with Monitor(layout, tell=lambda _: None) as monitor:
            (pid,) = [child.pid for program, child in monitor._children if program.name == "prometheus"]
            base = measure(layout, pid)
            for origin in pages:
                for node in range(options.nodes):
                    write_target(layout, origin, node, server.server_address[1])
            time.sleep(options.seconds)
            tell(options.nodes, base, measure(layout, pid))
    server.shutdown()


def write_target(layout: Layout, origin: str, node: int, port: int) -> None:
    """Adds a node to a job."""
    entry = [
        {
            "targets": [f"127.0.0.1:{port}"],
            "labels": {"cluster": "c", "node": f"n{node}", "__metrics_path__": f"/{origin}/n{node}"},
        }
    ]
    (layout.state_dir / "targets" / origin / f"n{node}.json").write_text(json.dumps(entry), encoding="utf-8")


def measure(layout: Layout, pid: int) -> dict[str, float]:
    """Returns what Prometheus says of itself, and its memory."""
    return {
        "series": ask(layout, "prometheus_tsdb_head_series"),
        "rss_bytes": float(psutil.Process(pid).memory_info().rss),
        "rules_s": ask(layout, "sum(prometheus_rule_group_last_duration_seconds)"),
        "slowest_s": ask(layout, "max(avg_over_time(prometheus_rule_group_last_duration_seconds[15s]))"),
        "kept": ask(layout, 'sum(scrape_samples_post_metric_relabeling{job=~"node|gpu",node="n0"})'),
        "scraped": ask(layout, 'sum(scrape_samples_scraped{job=~"node|gpu",node="n0"})'),
    }


def tell(nodes: int, base: dict[str, float], found: dict[str, float]) -> None:
    """Prints the measured part and what the whole cluster makes of it."""
    factor = NODES / nodes
    series = found["series"] - base["series"]
    grown = found["rss_bytes"] - base["rss_bytes"]
    print(f"a node: {found['scraped']:,.0f} samples scraped, {found['kept']:,.0f} kept")
    print(f"{nodes} nodes: {series:,.0f} series and {grown / 2**20:,.0f} MiB more ({grown / series:,.0f} B each)")
    print(f"rules: {found['rules_s'] * 1000:.0f} ms in all, slowest group {found['slowest_s'] * 1000:.0f} ms")
    whole = base["rss_bytes"] + grown * factor
    print(f"{NODES} nodes, times {factor:.0f}: {series * factor:,.0f} series, {whole / 2**30:.1f} GiB")
    share = found["slowest_s"] * factor / 15
    print(f"slowest group, times {factor:.0f}: {found['slowest_s'] * factor * 1000:.0f} ms, {share:.1%} of 15 s")


if __name__ == "__main__":
    main()
