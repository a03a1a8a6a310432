"""Facts of a node for node_exporter's textfile collector: fabric counters, health checks, XIDs, spot notice.

    node_facts.py --out /var/lib/prometheus/node-exporter [--sysfs /sys] [--health FILE] [--kernel-log FILE] [--spot F]

Needs nothing but Python and is called by a timer. node_exporter's own infiniband collector says nothing of EFA's bytes,
which lie in hw_counters; this does. The file is replaced as a whole, so a scrape never sees half of it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

Sample = tuple[str, dict[str, str], float]
"""Name, labels, value."""

# Counter of the port -> (directory, file, bytes a unit) for EFA and for InfiniBand (whose counters are 4-byte words).
_BYTES = {
    "loopworks_fabric_transmit_bytes_total": (("hw_counters", "tx_bytes", 1), ("counters", "port_xmit_data", 4)),
    "loopworks_fabric_receive_bytes_total": (("hw_counters", "rx_bytes", 1), ("counters", "port_rcv_data", 4)),
    "loopworks_fabric_rdma_read_bytes_total": (("hw_counters", "rdma_read_bytes", 1),),
    "loopworks_fabric_rdma_write_bytes_total": (("hw_counters", "rdma_write_bytes", 1),),
    "loopworks_fabric_retransmits_total": (("hw_counters", "retrans_pkts", 1),),
}
_ERRORS = (
    ("hw_counters", "rx_drops"),
    ("hw_counters", "retrans_timeout_events"),
    ("hw_counters", "impaired_remote_conn_events"),
    ("hw_counters", "unresponsive_remote_events"),
    ("counters", "link_downed"),
    ("counters", "symbol_error"),
    ("counters", "link_error_recovery"),
)
_NEEDED = ("loopworks_fabric_transmit_bytes_total", "loopworks_fabric_receive_bytes_total")
_GAUGES = {
    "loopworks_fabric_rate_bytes_per_second",
    "loopworks_fabric_counters_missing",
    "loopworks_fabric_up",
    "loopworks_health_check_status",
    "loopworks_health_check_timestamp_seconds",
    "loopworks_spot_notice",
}
_FATAL = {48, 63, 64, 74, 79, 94, 95, 119, 120}
_APPLICATION = {13, 31, 43, 45}
_OFF_THE_BUS = 79
_STATUS = {"ok": 0.0, "warning": 1.0, "failed": 2.0}


def fabric_samples(sysfs: Path) -> Iterator[Sample]:
    """Yields the counters of each EFA and InfiniBand port under `sysfs`/class/infiniband."""
    for port in sorted((sysfs / "class" / "infiniband").glob("*/ports/*")):
        device = port.parent.parent
        labels = {"device": device.name, "port": port.name, "kind": _kind(device)}
        found = {name: value for name, files in _BYTES.items() if (value := _first(port, files)) is not None}
        for name, value in found.items():
            yield name, labels, value
        yield "loopworks_fabric_counters_missing", labels, float(not all(name in found for name in _NEEDED))
        errors = [value for folder, file in _ERRORS if (value := _number(port / folder / file)) is not None]
        yield "loopworks_fabric_errors_total", labels, sum(errors)
        yield "loopworks_fabric_up", labels, float("ACTIVE" in _text(port / "state"))
        rate = re.match(r"([\d.]+) Gb/sec", _text(port / "rate"))
        if rate:
            yield "loopworks_fabric_rate_bytes_per_second", labels, float(rate.group(1)) * 1e9 / 8


def health_samples(path: Path) -> Iterator[Sample]:
    """Yields the results of health checks: a JSON file {"checks": {name: ok|warning|failed}, "time": unix seconds}."""
    if not path.is_file():
        return
    answer = json.loads(path.read_text(encoding="utf-8"))
    for check, status in sorted(answer["checks"].items()):
        # A word that is not known is a failure: better a false alarm than a silent one.
        yield "loopworks_health_check_status", {"check": check}, _STATUS.get(status, _STATUS["failed"])
    yield "loopworks_health_check_timestamp_seconds", {}, float(answer["time"])


def xid_samples(lines: Iterable[str]) -> Iterator[Sample]:
    """Yields counts of XIDs in kernel log lines; a GPU that fell off the bus without one is 79. Codes: a closed set."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for line in lines:
        match = re.search(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)", line)
        if match:
            counts[(match.group(1).lower(), *_xid_class(int(match.group(2))))] += 1
        elif "fallen off the bus" in line and "NVRM" in line:
            address = re.search(r"([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})", line)
            gpu = address.group(1).lower() if address else "unknown"
            counts[(gpu, *_xid_class(_OFF_THE_BUS))] += 1
    for (gpu, xid, kind), count in sorted(counts.items()):
        yield "loopworks_gpu_xid_total", {"gpu": gpu, "xid": xid, "class": kind}, float(count)


def exposition(samples: Iterable[Sample]) -> str:
    """Returns the text that node_exporter reads: the samples of a name together, under its type."""
    by_name: dict[str, list[str]] = {}
    for name, labels, value in samples:
        inner = ",".join(f'{key}="{_escape(text)}"' for key, text in labels.items())
        number = repr(int(value)) if float(value).is_integer() else repr(value)
        by_name.setdefault(name, []).append(f"{name}{{{inner}}} {number}" if inner else f"{name} {number}")
    parts = []
    for name, lines in by_name.items():
        parts += [f"# TYPE {name} {'gauge' if name in _GAUGES else 'counter'}", *lines]
    return "".join(f"{line}\n" for line in parts)


def write_whole(path: Path, text: str) -> None:
    """Replaces a file: a reader sees the old one or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.chmod(0o644)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def main(arguments: list[str] | None = None) -> int:
    """Writes loopworks_node.prom; returns 1, with a line on standard error, when a source could not be read."""
    parser = argparse.ArgumentParser(description="facts of this node for node_exporter's textfile collector")
    parser.add_argument("--out", type=Path, required=True, help="directory of the textfile collector")
    parser.add_argument("--sysfs", type=Path, default=Path("/sys"))
    parser.add_argument("--health", type=Path, default=Path("/run/loopworks/health.json"))
    parser.add_argument("--kernel-log", type=Path, default=Path("/var/log/kern.log"))
    parser.add_argument("--spot", type=Path, default=Path("/run/loopworks/spot-notice"))
    options = parser.parse_args(arguments)
    samples, failed = list(fabric_samples(options.sysfs)), False
    samples.append(("loopworks_spot_notice", {}, float(options.spot.exists())))
    try:
        samples += health_samples(options.health)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        # A check that cannot be read counts as failed, and is told by name.
        samples.append(("loopworks_health_check_status", {"check": "report"}, _STATUS["failed"]))
        print(f"error: {options.health}: {error}\n  next: see what writes it", file=sys.stderr)
        failed = True
    if options.kernel_log.is_file():
        with options.kernel_log.open(encoding="utf-8", errors="replace") as log:
            samples += xid_samples(log)
    write_whole(options.out / "loopworks_node.prom", exposition(samples))
    return int(failed)


def _kind(device: Path) -> str:
    return "efa" if device.name.startswith(("efa", "rdmap")) or (device / "device" / "efa").exists() else "infiniband"


def _xid_class(code: int) -> tuple[str, str]:
    if code in _FATAL:
        return str(code), "fatal"
    return (str(code), "application") if code in _APPLICATION else ("other", "other")


def _first(port: Path, files: Iterable[tuple[str, str, int]]) -> float | None:
    for folder, file, unit in files:
        value = _number(port / folder / file)
        if value is not None:
            return value * unit
    return None


def _number(path: Path) -> float | None:
    text = _text(path)
    return float(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""  # a counter that this hardware does not have


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


if __name__ == "__main__":
    sys.exit(main())
