"""Stands in for the exporters that need hardware: python -m tests.system.monitoring_standin ADDRESS_FILE FAULTS_FILE.

Serves /gpu/NODE as dcgm-exporter does (names, types and help of monitoring/dcgm/fields.csv, its labels), and
/node/NODE as node_exporter with the textfiles of the node and of the queue. Every series of monitoring/series.yaml of
these origins is there. A node says what a healthy one says, until its name is in FAULTS_FILE, one a line: nodes are
named by the alert that their fault sets off, and their GPUs work for a run of the same name.
"""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import yaml

from tests.unit.monitoring.tools import MONITORING

GPUS = 4
Value = float | Callable[[float], float]
"""What a series says; a function gets the seconds since the fault began."""

HEALTHY: dict[str, Value] = {
    "DCGM_FI_DEV_GPU_UTIL": 97,
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": 0.97,
    "DCGM_FI_PROF_SM_ACTIVE": 0.9,
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": 0.4,
    "DCGM_FI_DEV_SM_CLOCK": 1980,
    "DCGM_FI_DEV_POWER_USAGE": 650,
    "loopworks_fabric_up": 1,
    "loopworks_fabric_rate_bytes_per_second": 12.5e9,
    "loopworks_queue_jobs": 0,
    "loopworks_spend_dollars": 10,
    "loopworks_budget_dollars": 100,
    "node_filesystem_avail_bytes": 5e11,
    "node_filesystem_size_bytes": 1e12,
}
# Their value is the time itself: fresh.
FRESH = ("node_textfile_mtime_seconds", "loopworks_health_check_timestamp_seconds")
FAULTS: dict[str, dict[str, Value]] = {
    "GpuUtilizationLow": {"DCGM_FI_DEV_GPU_UTIL": 85},
    "GpuUtilizationVeryLow": {"DCGM_FI_DEV_GPU_UTIL": 60},
    "GpuHung": {"DCGM_FI_DEV_GPU_UTIL": 100, "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": 0.001},
    "GpuExporterFault": {"DCGM_FI_PROF_GR_ENGINE_ACTIVE": 0},
    "GpuXidFatal": {"DCGM_EXP_XID_ERRORS_COUNT": 1},
    "GpuXidApplication": {"DCGM_EXP_XID_ERRORS_COUNT": 1},
    "GpuEccUncorrectable": {"DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": lambda s: s // 2},
    "GpuRowRemapFailure": {"DCGM_FI_DEV_ROW_REMAP_FAILURE": 1},
    "GpuThermalThrottle": {"DCGM_FI_DEV_THERMAL_VIOLATION": lambda s: s * 1e5},
    "GpuClockStraggler": {"DCGM_FI_DEV_SM_CLOCK": 1000},
    "GpuPcieReplays": {"DCGM_FI_DEV_PCIE_REPLAY_COUNTER": lambda s: s * 10},
    "FabricPortDown": {"loopworks_fabric_up": 0},
    "FabricErrors": {"loopworks_fabric_errors_total": lambda s: s * 10},
    "DiskFilling": {"node_filesystem_avail_bytes": lambda s: 3.9e11 * (1 - s / 1000)},
    "NodeFactsStale": {"node_textfile_mtime_seconds": 1e9},
    "HealthChecksStale": {"loopworks_health_check_timestamp_seconds": 1e9},
    "ClockOffset": {"node_timex_offset_seconds": -0.7},
    "QueueWaiting": {"loopworks_queue_oldest_wait_seconds": 4000},
    "QueueDeadLetters": {"loopworks_queue_jobs": 1},
    "BudgetNear": {"loopworks_spend_dollars": 95},
    "BudgetExceeded": {"loopworks_spend_dollars": 120},
}
# Faults of one GPU: the others go on as before.
ONE_GPU = ("GpuClockStraggler", "GpuXidFatal", "GpuXidApplication", "GpuEccUncorrectable", "GpuRowRemapFailure")
XIDS = {"GpuXidFatal": "79", "GpuXidApplication": "31"}
WITHOUT_FABRIC = "FabricAbsent"


@cache
def dcgm_fields() -> list[tuple[str, str, str]]:
    """Returns (name, type, help) of the fields that dcgm-exporter is told to export."""
    rows = csv.reader((MONITORING / "dcgm" / "fields.csv").read_text().splitlines(), skipinitialspace=True)
    return [(row[0], row[1], row[2]) for row in rows if row and not row[0].startswith("#")]


@cache
def node_series() -> list[tuple[str, str, str]]:
    """Returns (name, type, help) of what a node_exporter says with all textfiles."""
    known = yaml.safe_load((MONITORING / "series.yaml").read_text())
    origins = ("node_exporter", "textfile", "queue")
    return [(name, kind, text) for origin in origins for name, (kind, _, text) in known[origin].items()]


def dcgm_page(node: str, since_s: float | None) -> Iterator[str]:
    """Yields what dcgm-exporter says of a node; `since_s`: seconds since its fault began."""
    for name, kind, text in dcgm_fields():
        yield f"# HELP {name} {text}"
        yield f"# TYPE {name} {kind}"
        for gpu in range(GPUS):
            faulty = since_s is not None and (node not in ONE_GPU or gpu == GPUS - 1)
            labels = (
                f'gpu="{gpu}",UUID="GPU-{gpu}",pci_bus_id="00000000:{gpu}A:00.0",device="nvidia{gpu}",'
                f'modelName="NVIDIA H100 80GB HBM3",Hostname="{node}",hpc_job="{node}"'
            )
            if name == "DCGM_EXP_XID_ERRORS_COUNT":
                # dcgm-exporter has this series only while there are XIDs in its window.
                if not faulty or node not in XIDS:
                    continue
                labels += f',window_size_in_ms="300000",xid="{XIDS[node]}"'
            yield f"{name}{{{labels}}} {_value(name, node, since_s if faulty else None)}"


def node_page(node: str, since_s: float | None, fabric: bool) -> Iterator[str]:
    """Yields what node_exporter says of a node: its own series, the textfiles and the queue's."""
    labels = {
        "node_filesystem": 'mountpoint="/",fstype="ext4",device="/dev/nvme0n1"',
        "node_textfile": 'file="/var/lib/prometheus/node-exporter/loopworks_node.prom"',
        "node_cpu": 'cpu="0",mode="idle"',
        "loopworks_fabric": 'device="rdmap0",port="1",kind="efa"',
        "loopworks_health_check_status": 'check="disk"',
        "loopworks_queue_jobs": 'state="dead"',
        "loopworks_spend": f'run="{node}"',
        "loopworks_budget": f'run="{node}"',
        "loopworks_node_busy": f'run="{node}"',
    }
    for name, kind, text in node_series():
        if name == "loopworks_gpu_xid_total" or (name.startswith("loopworks_fabric") and not fabric):
            continue
        inner = next((chosen for beginning, chosen in labels.items() if name.startswith(beginning)), "")
        yield f"# HELP {name} {text}"
        yield f"# TYPE {name} {kind}"
        yield f"{name}{{{inner}}} {_value(name, node, since_s)}"


def _value(name: str, node: str, since_s: float | None) -> float:
    value = FAULTS.get(node, {}).get(name) if since_s is not None else None
    if value is None:
        value = time.time() if name in FRESH else HEALTHY.get(name, 0)
    return value(since_s or 0.0) if callable(value) else value


class StandIn(ThreadingHTTPServer):
    """Serves the pages; remembers when each fault was first seen in the file."""

    daemon_threads = True

    def __init__(self, faults_file: Path) -> None:
        self._file, self._began = faults_file, dict[str, float]()
        super().__init__(("127.0.0.1", 0), _Handler)

    def since(self, fault: str) -> float | None:
        """Seconds since a fault began; None while it is not there."""
        if fault not in self._file.read_text().split():
            self._began.pop(fault, None)
            return None
        return time.time() - self._began.setdefault(fault, time.time())


class _Handler(BaseHTTPRequestHandler):
    server: StandIn

    def do_GET(self) -> None:
        _, origin, node = self.path.split("/")
        since_s = self.server.since(node)
        if origin == "gpu":
            lines = dcgm_page(node, since_s)
        else:
            lines = node_page(node, since_s, fabric=self.server.since(WITHOUT_FABRIC) is None)
        body = ("\n".join(lines) + "\n").encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    address_file, faults_file = map(Path, sys.argv[1:])
    server = StandIn(faults_file)
    address_file.write_text("{}:{}".format(*server.server_address[:2]))
    server.serve_forever()
