"""Facts to findings, check by check."""

from __future__ import annotations

from typing import Any

import pytest

from launch.preflight import PreflightError, Wanted, failed, judge
from launch.ssh import HostError

WANTED = Wanted("/runs", "/data")
GPU = {"name": "H100", "memory_bytes": 1, "compute_capability": [9, 0]}


def facts(**changes: Any) -> dict[str, Any]:
    path = {"exists": True, "writable": True, "free_bytes": 2**40}
    return {
        "hostname": "x", "python": "/p", "versions": {"torch": "2.9", "deepspeed": "0.19", "python": "3.11.7"},
        "clock_offset_s": 0.0, "paths": {"/runs": path, "/data": path}, "token": True, "port_free": None,
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
        ({"versions": {"torch": "2.8", "deepspeed": "0.19", "python": "3.11.1"}}, "torch"),
        ({"versions": {"torch": "2.9", "deepspeed": "", "python": "3.11.1"}}, "deepspeed"),
        ({"versions": {"torch": "2.9", "deepspeed": "0.19", "python": "3.10.1"}}, "python"),
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
    assert faults(facts(paths={"/runs": missing, "/data": missing})) == [("data.path", "b")]
    assert faults(facts(paths={"/runs": locked, "/data": locked})) == [("run.dir", "b")]


def test_port_is_looked_at_on_the_first_node_only() -> None:
    taken = {"a": facts(port_free=False), "b": facts(port_free=False)}
    found = [finding for finding in judge(taken, Wanted("/runs", None, 29500)) if finding.level == "fail"]
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
