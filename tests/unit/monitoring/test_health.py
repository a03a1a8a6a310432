"""Health checks of a node: what each makes of its facts, and that none of them can hang."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from monitoring.textfile import health_checks, node_facts
from monitoring.textfile.health import main, read_expected
from monitoring.textfile.health_checks import CHECKS, Answer, Expected, Facts, Port, results
from tests.unit.monitoring.tools import MONITORING

SCRIPTS = {name: MONITORING / "textfile" / name for name in ("health.py", "health_checks.py", "node_facts.py")}
SMI = "0, 550.54.15, 0\n1, 550.54.15, 0\n"
NODE = Expected(gpus=2, efa=1, infiniband=0, mounts=("/shared",))
GOOD = Facts(
    pci_gpus=2,
    nvswitches=4,
    smi=Answer(0, SMI),
    fabric_manager=Answer(0, "active\n"),
    loaded_driver="550.54.15",
    installed_driver="550.54.15",
    kernel_log=("[    1.0] NVRM: loading", "[ 7.0] NVRM: Xid (PCI:0000:53:00): 31, pid=9, Ch 00000010"),
    ports=(Port("rdmap0", "efa", True), Port("mlx5_0", "infiniband", True)),
    mount_points=("/", "/shared"),
    file_systems={"/": Answer(0, "100 50\n"), "/shared": Answer(0, "100 1\n")},
    limits="* - memlock unlimited",
)


def statuses(facts: Facts, expected: Expected = NODE) -> dict[str, str]:
    return {name: result.status for name, result in results(facts, expected).items()}


def test_a_good_node_passes_every_check() -> None:
    found = statuses(GOOD)
    # infiniband: not promised, and nothing wrong with what is there.
    assert set(found) == {*CHECKS, "mount:/shared"} - {"infiniband"}
    assert set(found.values()) == {"ok"}


XID = "NVRM: Xid (PCI:0000:53:00): 79, pid=1234, GPU has fallen off the bus."
FAULTS: list[tuple[dict[str, Any], str, str, str]] = [
    ({"smi": Answer(None)}, "nvidia_smi", "failed", "does not answer"),
    ({"smi": Answer(None, missing=True)}, "nvidia_smi", "failed", "not installed"),
    ({"smi": Answer(9, "Failed to initialize NVML\nmore")}, "nvidia_smi", "failed", "Failed to initialize NVML"),
    ({"smi": Answer(0, "0, 550.54.15, 0\n")}, "gpu_count", "failed", "1 GPUs answer, 2 are expected"),
    ({"smi": Answer(0, "0, 550.54.15, 0\n1, 550.54.15, 3\n")}, "gpu_ecc", "failed", "GPU 1: 3"),
    ({"kernel_log": [f"[ 99.5] {XID}"]}, "gpu_xid", "failed", "XID 79 of 0000:53:00"),
    ({"kernel_log": ["NVRM: GPU 0000:9a:00.0: GPU has fallen off the bus."]}, "gpu_xid", "failed", "off the bus"),
    ({"fabric_manager": Answer(3, "inactive\n")}, "fabric_manager", "failed", "inactive"),
    ({"fabric_manager": Answer(None)}, "fabric_manager", "failed", "not known"),
    ({"loaded_driver": "535.1"}, "driver", "failed", "nvidia-smi is of 550.54.15"),
    ({"installed_driver": "570.1"}, "driver", "warning", "boot"),
    ({"ports": [Port("rdmap0", "efa", False)]}, "efa", "failed", "0 of 1 devices have an active port; down: rdmap0"),
    ({"ports": []}, "efa", "failed", "0 of 1"),
    (
        {"ports": [Port("rdmap0", "efa", True), Port("mlx5_1", "infiniband", False)]},
        *("infiniband", "warning", "down: mlx5_1"),
    ),
    ({"file_systems": {**GOOD.file_systems, "/": Answer(0, "100 7")}}, "disk", "warning", "7.0% of /"),
    ({"file_systems": {**GOOD.file_systems, "/": Answer(0, "100 4")}}, "disk", "failed", "4.0% of /"),
    ({"file_systems": {**GOOD.file_systems, "/": Answer(0, "words")}}, "disk", "failed", "not understood"),
    ({"clock_state": health_checks.TIME_ERROR}, "clock", "warning", "not synchronised"),
    ({"limits": "* soft memlock unlimited\n# * hard memlock unlimited"}, "memlock", "failed", "limits.d"),
    ({"mount_points": ["/"]}, "mount:/shared", "failed", "not mounted"),
    ({"file_systems": {**GOOD.file_systems, "/shared": Answer(None)}}, "mount:/shared", "failed", "does not answer"),
    ({"file_systems": {**GOOD.file_systems, "/shared": Answer(1, "stat: stale")}}, "mount:/shared", "failed", "stale"),
]


@pytest.mark.parametrize(("changes", "check", "status", "said"), FAULTS)
def test_each_fault_is_told_by_its_check_alone(changes: dict[str, Any], check: str, status: str, said: str) -> None:
    found = results(replace(GOOD, **changes), NODE)
    assert found[check].status == status
    assert said in found[check].message
    assert {name for name, result in found.items() if result.status != "ok"} == {check}


def test_each_check_has_a_fault() -> None:
    assert {check for _, check, _, _ in FAULTS} == {*CHECKS, "mount:/shared"}


def test_a_node_without_gpus_and_fabric_is_not_asked_for_them() -> None:
    facts = Facts(file_systems={"/": Answer(0, "100 50")})
    assert statuses(facts, Expected()) == {"disk": "ok", "clock": "ok"}
    # A node that was promised GPUs and has lost all of them, on PCI too, has failed.
    assert statuses(facts, Expected(gpus=8))["nvidia_smi"] == "failed"


def test_an_xid_that_was_dealt_with_counts_no_more() -> None:
    facts = replace(GOOD, kernel_log=[f"[ 99.5] {XID}"], boot_s=1000.0)
    assert statuses(replace(facts, xids_handled_s=1099.0))["gpu_xid"] == "failed"
    assert statuses(replace(facts, xids_handled_s=1100.0))["gpu_xid"] == "ok"


def test_both_scripts_know_the_same_xids() -> None:
    assert health_checks.FATAL_XIDS == node_facts._FATAL


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"gpus": "8"}', '{"efa": -1}', '{"mounts": ["shared"]}', '{"mounts": "/shared"}']
)
def test_a_file_of_another_shape_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "node.json"
    file.write_text(text)
    with pytest.raises(ValueError, match="."):
        read_expected(file)


def test_what_the_node_should_have(tmp_path: Path) -> None:
    file = tmp_path / "node.json"
    assert read_expected(file) == Expected()
    file.write_text('{"gpus": 0, "efa": 32, "infiniband": 0, "mounts": ["/shared"]}')
    assert read_expected(file) == Expected(0, 32, 0, ("/shared",))


def program(folder: Path, name: str, script: str) -> None:
    """A stand-in for a system program, found by PATH."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """The root of a made-up node with two GPUs, one NVSwitch and one EFA device."""
    root = tmp_path / "root"
    files = {
        "proc/stat": "cpu 1 2\nbtime 1000\n",
        "proc/self/mounts": "a / ext4 rw 0 0\nb /my\\040data nfs rw 0 0\n",
        "sys/module/nvidia/version": "550.54.15\n",
        "sys/class/infiniband/dev0/ports/1/state": "4: ACTIVE\n",
        "etc/security/limits.d/90-rdma.conf": "* - memlock unlimited\n",
        "etc/loopworks/node.json": '{"gpus": 2, "efa": 1, "mounts": ["/my data"]}',
    }
    for number, kind in enumerate(("0x030200", "0x030200", "0x068000")):
        files[f"sys/bus/pci/devices/{number}/vendor"] = "0x10de\n"
        files[f"sys/bus/pci/devices/{number}/class"] = kind + "\n"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "drivers" / "efa").mkdir(parents=True)
    device = root / "sys/class/infiniband/dev0/device"
    device.mkdir()
    (device / "driver").symlink_to(root / "drivers" / "efa")
    binaries = tmp_path / "bin"
    program(binaries, "nvidia-smi", f"printf '{SMI}'")
    program(binaries, "systemctl", "echo active")
    program(binaries, "modinfo", "echo 550.54.15")
    program(binaries, "dmesg", "echo '[ 1.0] all is well'")
    program(binaries, "stat", "echo 100 50")
    return tmp_path


def run_script(node: Path, *options: str) -> tuple[dict[str, Any], float]:
    # As on a node: files in a folder, and no packages but Python's own.
    for name in ("health.py", "health_checks.py"):
        shutil.copy(SCRIPTS[name], node / name)
    command = [sys.executable, "-E", "-s", "-S", str(node / "health.py"), "--out", str(node / "out" / "health.json")]
    began = time.monotonic()
    outcome = subprocess.run(
        [*command, "--root", str(node / "root"), *options],
        env={**os.environ, "PATH": f"{node / 'bin'}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stderr
    return json.loads((node / "out" / "health.json").read_text()), time.monotonic() - began


def test_facts_of_a_node_are_found(node: Path) -> None:
    report, _ = run_script(node)
    clock = report["checks"].pop("clock")
    assert clock in ("ok", "warning"), "it is that of this machine"
    assert set(report["checks"].values()) == {"ok"}, report["messages"]
    assert set(report["checks"]) == {*CHECKS, "mount:/my data"} - {"infiniband", "clock"}
    assert abs(report["time"] - time.time()) < 30
    samples = {labels.get("check"): value for _, labels, value in node_facts.health_samples(node / "out/health.json")}
    assert samples["mount:/my data"] == 0


def test_what_hangs_holds_nothing_up(node: Path) -> None:
    program(node / "bin", "nvidia-smi", "exec sleep 60")
    program(node / "bin", "stat", "exec sleep 60")
    report, took_s = run_script(node, "--deadline-s", "0.5")
    assert took_s < 10
    failed = {name for name, status in report["checks"].items() if status == "failed"}
    assert failed == {"nvidia_smi", "mount:/my data", "disk"}
    assert len(report["left"]) == 3


def test_a_process_that_is_still_stuck_is_not_joined_by_another(node: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as stuck:
        try:
            (node / "out").mkdir()
            (node / "out" / "health.json").write_text(json.dumps({"left": {"stat -f -c %b %a -- /my data": stuck.pid}}))
            report, took_s = run_script(node)
            assert report["checks"]["mount:/my data"] == "failed"
            assert report["left"] == {"stat -f -c %b %a -- /my data": stuck.pid}
            assert took_s < 5, "it waited for what it had not asked"
        finally:
            stuck.kill()
    report, _ = run_script(node)
    assert (report["checks"]["mount:/my data"], report["left"]) == ("ok", {})


def test_a_broken_expectation_is_a_failed_check(node: Path) -> None:
    (node / "root/etc/loopworks/node.json").write_text("{broken")
    report, _ = run_script(node)
    assert report["checks"]["node_json"] == "failed"
    assert report["checks"]["gpu_count"] == "ok", "PCI tells how many there should be"


def test_a_report_that_cannot_be_written_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["--out", str(tmp_path / "file" / "health.json"), "--root", str(tmp_path), "--deadline-s", "2"]) == 1
    assert "next:" in capsys.readouterr().err


def test_nothing_newer_than_python_3_9_is_used() -> None:
    import ast

    for script in SCRIPTS.values():
        ast.parse(script.read_text(), feature_version=(3, 9))
