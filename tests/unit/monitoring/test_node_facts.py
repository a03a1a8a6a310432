"""Facts of a node, from a sysfs that is laid out like those of EFA and InfiniBand hosts."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from monitoring.textfile.node_facts import exposition, fabric_samples, health_samples, main, write_whole, xid_samples
from tests.unit.monitoring.tools import MONITORING, known_series, needs

LOG = """
kernel: NVRM: Xid (PCI:0000:53:00): 79, pid=1234, GPU has fallen off the bus.
kernel: NVRM: Xid (PCI:0000:53:00): 31, pid=99, Ch 00000010
kernel: NVRM: Xid (PCI:0000:53:00): 31, pid=99, Ch 00000010
kernel: NVRM: GPU 0000:9a:00.0: GPU has fallen off the bus.
kernel: NVRM: Xid (PCI:0000:53:00): 999, something new
kernel: eth0: link up
""".splitlines()


def port(sysfs: Path, device: str, files: dict[str, str]) -> None:
    folder = sysfs / "class" / "infiniband" / device / "ports" / "1"
    for name, text in {"state": "4: ACTIVE\n", "rate": "100 Gb/sec (4X EDR)\n", **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def values(sysfs: Path) -> dict[str, float]:
    return {name: value for name, _, value in fabric_samples(sysfs)}


def test_efa_bytes_come_from_hw_counters(tmp_path: Path) -> None:
    port(
        tmp_path,
        "rdmap16s27",
        {"hw_counters/tx_bytes": "1000\n", "hw_counters/rx_bytes": "7\n", "hw_counters/rx_drops": "3\n"},
    )
    found = values(tmp_path)
    assert found["loopworks_fabric_transmit_bytes_total"] == 1000
    assert found["loopworks_fabric_receive_bytes_total"] == 7
    assert found["loopworks_fabric_errors_total"] == 3
    assert found["loopworks_fabric_counters_missing"] == 0
    assert found["loopworks_fabric_rate_bytes_per_second"] == 12.5e9
    assert {labels["kind"] for _, labels, _ in fabric_samples(tmp_path)} == {"efa"}


def test_infiniband_counts_words_of_four_bytes(tmp_path: Path) -> None:
    port(tmp_path, "mlx5_0", {"counters/port_xmit_data": "250\n", "counters/port_rcv_data": "1\n"})
    assert values(tmp_path)["loopworks_fabric_transmit_bytes_total"] == 1000
    assert {labels["kind"] for _, labels, _ in fabric_samples(tmp_path)} == {"infiniband"}


def test_a_port_without_counters_or_link_says_so(tmp_path: Path) -> None:
    port(tmp_path, "rdmap0", {"state": "1: DOWN\n"})
    found = values(tmp_path)
    assert found["loopworks_fabric_counters_missing"] == 1
    assert found["loopworks_fabric_up"] == 0


def test_xids_are_counted_by_a_closed_set_of_codes() -> None:
    found = {(labels["gpu"], labels["xid"], labels["class"]): value for _, labels, value in xid_samples(LOG)}
    assert found == {
        ("0000:53:00", "79", "fatal"): 1,
        ("0000:53:00", "31", "application"): 2,
        ("0000:9a:00", "79", "fatal"): 1,
        ("0000:53:00", "other", "other"): 1,
    }


def test_a_status_that_is_not_known_counts_as_failed(tmp_path: Path) -> None:
    report = tmp_path / "health.json"
    report.write_text(json.dumps({"checks": {"disk": "ok", "gpu": "strange"}, "time": 5}))
    assert [value for _, _, value in health_samples(report)] == [0, 2, 5]


def test_the_file_is_what_node_exporter_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    port(tmp_path / "sys", "rdmap0", {"hw_counters/tx_bytes": "1\n", "hw_counters/rx_bytes": "1\n"})
    (tmp_path / "kern.log").write_text("\n".join(LOG))
    (tmp_path / "health.json").write_text("{broken")
    (tmp_path / "spot").touch()
    options = ["--out", str(tmp_path), "--sysfs", str(tmp_path / "sys"), "--kernel-log", str(tmp_path / "kern.log")]
    code = main([*options, "--health", str(tmp_path / "health.json"), "--spot", str(tmp_path / "spot")])
    text = (tmp_path / "loopworks_node.prom").read_text()
    assert code == 1
    assert "next:" in capsys.readouterr().err
    assert 'loopworks_health_check_status{check="report"} 2' in text
    assert "loopworks_spot_notice 1" in text
    assert [path.name for path in tmp_path.glob(".*")] == []


@needs("promtool")
def test_promtool_accepts_it(tmp_path: Path) -> None:
    port(tmp_path, 'a"b\\c', {"hw_counters/tx_bytes": "1\n", "hw_counters/rx_bytes": "1\n"})
    text = exposition([*fabric_samples(tmp_path), *xid_samples(LOG)])
    outcome = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert "error while linting" not in outcome.stderr + outcome.stdout


def test_names_and_types_are_those_of_the_list(tmp_path: Path) -> None:
    port(
        tmp_path,
        "rdmap0",
        {
            f"hw_counters/{name}": "1\n"
            for name in ("tx_bytes", "rx_bytes", "rdma_read_bytes", "rdma_write_bytes", "retrans_pkts")
        },
    )
    report = tmp_path / "health.json"
    report.write_text(json.dumps({"checks": {"disk": "ok"}, "time": 5}))
    samples = [
        *fabric_samples(tmp_path),
        *xid_samples(LOG),
        *health_samples(report),
        ("loopworks_spot_notice", {}, 1.0),
    ]
    written = dict(line.split()[2:] for line in exposition(samples).splitlines() if line.startswith("# TYPE"))
    known = known_series()
    assert {name: known[name] for name in written} == written
    listed = {
        name
        for name in known
        if name.startswith(("loopworks_fabric", "loopworks_health", "loopworks_spot", "loopworks_gpu"))
    }
    assert set(written) == listed


def test_dcgm_fields_are_those_of_the_list() -> None:
    rows = [
        row
        for row in csv.reader((MONITORING / "dcgm" / "fields.csv").read_text().splitlines(), skipinitialspace=True)
        if row and not row[0].startswith("#")
    ]
    assert {row[0]: row[1] for row in rows} == {n: t for n, t in known_series().items() if n.startswith("DCGM_")}
    assert all(len(row) == 3 for row in rows)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "a.prom"
    target.write_text("old")

    def fail(self: Path, *_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(OSError, match="No space"):
        write_whole(target, "new")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_it_runs_with_nothing_but_python(tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-S", str(MONITORING / "textfile" / "node_facts.py"), "--out", str(tmp_path)]
    outcome = subprocess.run(
        [*command, "--sysfs", str(tmp_path)], capture_output=True, text=True, timeout=30, check=False
    )
    assert outcome.returncode == 0, outcome.stderr
    assert "loopworks_spot_notice 0" in (tmp_path / "loopworks_node.prom").read_text()
