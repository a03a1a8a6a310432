"""Facts to findings, check by check."""

from __future__ import annotations

from typing import Any

import pytest

from launch.preflight import PreflightError, Wanted, failed, judge
from launch.ssh import HostError

WANTED = Wanted("/runs", ("/data", "/more"))
GPU = {"name": "H100", "memory_bytes": 1, "compute_capability": [9, 0]}
VERSIONS = {"torch": "2.9", "deepspeed": "0.19", "python": "3.11.7", "cuda": "12.8", "nccl": "2.27.3"}


def facts(**changes: Any) -> dict[str, Any]:
    path = {"exists": True, "writable": True, "free_bytes": 2**40}
    return {
        "hostname": "x", "python": "/p", "versions": VERSIONS, "drained": None, "node_folder": path,
        "driver_cuda": "13.0", "clock_offset_s": 0.0, "token": True, "port_free": None,
        "paths": {"/runs": path, "/data": path, "/more": path},
        "limits": {"memlock": -1, "nofile": -1}, "shm_bytes": 2**34, "infiniband": [], "machine": {"gpus": [GPU]},
        "driver": "620.1", "ecc_errors": 0, "xid": [], "nvlink": "", "fabric_manager": "", **changes,
    }  # fmt: skip


def faults(two: dict[str, Any], wanted: Wanted = WANTED, deep: bool = True) -> list[tuple[str, str]]:
    found = judge({"a": facts(), "b": two, "c": facts()}, wanted, deep=deep)
    return [(finding.check, finding.node) for finding in found if finding.level == "fail"]


def test_equal_nodes_have_no_faults() -> None:
    assert faults(facts()) == []


@pytest.mark.parametrize(
    ("change", "check"),
    [
        ({"versions": {**VERSIONS, "torch": "2.8"}}, "torch"),
        ({"versions": {**VERSIONS, "deepspeed": ""}}, "deepspeed"),
        ({"versions": {**VERSIONS, "python": "3.10.1"}}, "python"),
        ({"versions": {**VERSIONS, "nccl": "2.26"}}, "nccl"),
        ({"versions": {**VERSIONS, "cuda": "12.6"}}, "cuda"),
        ({"versions": {**VERSIONS, "cuda": ""}}, "cuda"),
        ({"driver_cuda": "11.8"}, "cuda"),
        ({"drained": "kernel upgrade"}, "drained"),
        ({"node_folder": {"exists": True, "writable": False, "free_bytes": 2**40}}, "node folder"),
        ({"node_folder": {"exists": True, "writable": True, "free_bytes": 0}}, "node folder"),
        ({"clock_offset_s": -2.5}, "clock"),
        ({"token": False}, "run.dir"),
        ({"machine": {"gpus": []}}, "gpus"),
        ({"driver": "610"}, "driver"),
        ({"ecc_errors": 2}, "ecc"),
        ({"nvlink": "Link 3: inActive"}, "nvlink"),
        ({"nvlink": "Link 0: 26 GB/s", "fabric_manager": "failed\n"}, "fabric manager"),
        ({"infiniband": [{"device": "mlx5_0", "port": "1", "state": "1: DOWN"}]}, "rdma"),
        ({"infiniband": [{"device": "efa", "port": "1", "state": "4: ACTIVE"}], "limits": {"memlock": 8, "nofile": -1}},
         "memlock"),
    ],
)  # fmt: skip
def test_each_fault_is_found_on_its_node(change: dict[str, Any], check: str) -> None:
    assert (check, "b") in faults(facts(**change))


def test_paths_must_exist_and_be_writable() -> None:
    missing = {"exists": False, "writable": True, "free_bytes": 2**40}
    locked = {"exists": True, "writable": False, "free_bytes": 2**40}
    assert faults(facts(paths={"/runs": missing, "/data": missing, "/more": locked})) == [("data.path", "b")]
    assert faults(facts(paths={"/runs": locked, "/data": locked, "/more": locked})) == [("run.dir", "b")]
    every = facts(paths={"/runs": missing, "/data": missing, "/more": missing})
    assert faults(every) == [("data.path", "b")] * 2, "each dataset of a mixture"


def test_cuda_within_a_major_version_and_nodes_without_gpus_are_fine() -> None:
    assert faults(facts(driver_cuda="12.4")) == []
    without = facts(machine={"gpus": []}, versions={**VERSIONS, "cuda": "", "nccl": ""})
    found = judge({"a": without, "b": without}, WANTED, deep=True)
    assert not failed(found)
    assert not {"nccl", "cuda"} & {finding.check for finding in found}


def test_a_drained_node_is_named_with_reason_and_remedy() -> None:
    (found,) = [f for f in judge({"a": facts(), "b": facts(drained="kernel upgrade")}, WANTED) if f.level == "fail"]
    assert (found.check, found.node) == ("drained", "b")
    assert "kernel upgrade" in found.message
    assert "/var/lib/loopworks/drained" in found.remedy
    assert "--spares" in found.remedy


def test_port_is_looked_at_on_the_first_node_only() -> None:
    taken = {"a": facts(port_free=False), "b": facts(port_free=False)}
    found = [finding for finding in judge(taken, Wanted("/runs", (), 29500)) if finding.level == "fail"]
    assert [(finding.check, finding.node) for finding in found] == [("port", "a")]


def test_all_faults_are_in_one_message_with_exit_code_3() -> None:
    silent = HostError("b", "timeout", "no SSH answer within 10 s", "is it up?")
    found = judge({"a": facts(), "b": silent, "c": facts(clock_offset_s=9.0)}, WANTED)
    assert failed(found)
    error = PreflightError(found)
    assert error.exit_code == 3
    assert "2 fault(s)" in str(error)
    assert "b: timeout: no SSH answer" in str(error)
    assert "c: clock: +9.0 s off" in str(error)
    assert "b: is it up?" in str(error)


def test_warnings_forbid_nothing() -> None:
    found = judge({"a": facts(limits={"memlock": 8, "nofile": 1024}, shm_bytes=1)}, WANTED, deep=True)
    assert {finding.check for finding in found if finding.level == "warn"} == {"nofile", "shm"}
    assert not failed(found)
