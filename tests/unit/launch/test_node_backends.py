"""What would run on each node: pure functions."""

from __future__ import annotations

from typing import Any

import pytest

from launch.backends.mpirun import MpirunBackend
from launch.backends.ssh import Meeting, agent_spec, node_specs
from launch.machine import Gpu, MachineFacts
from launch.mpi_rank import rank_variables
from launch.plan import RunPlan, build_plan
from training.config import load_config

MEETING = Meeting("10.0.0.1", 29500, 29501)


def plan(gpus: int, nodes: int = 2) -> RunPlan:
    cards = (Gpu("NVIDIA H100", 80 * 2**30, (9, 0)),) * gpus
    return build_plan(load_config(None, []), [MachineFacts(f"n{i}", 8, 2**36, True, cards) for i in range(nodes)])


def facts(**more: Any) -> dict[str, dict[str, Any]]:
    one = {"home": "/home/u", "python": "/p/python", "interface": "ens5", "machine": {"cpu_count": 8}, **more}
    return {"n0": dict(one), "n1": {**one, "interface": "ens6", "home": "/root"}}


def test_each_node_has_its_rank_its_interface_and_its_home() -> None:
    first, second = node_specs(plan(0), facts(), MEETING, "/runs/x", "~/.loopworks/code/abc", {})
    assert first.directory == "/home/u/.loopworks/code/abc"
    assert second.directory == second.env["PYTHONPATH"] == "/root/.loopworks/code/abc"
    assert [("--node-rank=0" in s.argv, "--node-rank=1" in s.argv) for s in (first, second)] == [
        (True, False),
        (False, True),
    ]
    assert (first.env["GLOO_SOCKET_IFNAME"], second.env["GLOO_SOCKET_IFNAME"]) == ("ens5", "ens6")
    assert first.env["OMP_NUM_THREADS"] == "4", "the processors of one node are shared by its own ranks"
    for spec in (first, second):
        assert {"--nnodes=2", "--master-addr=10.0.0.1", "--master-port=29500", "--max-restarts=0"} <= set(spec.argv)


def test_network_of_gpu_nodes_is_derived_and_can_be_overridden() -> None:
    (spec, _) = node_specs(plan(8), facts(efa=4), MEETING, "/r", "~/c", {"NCCL_DEBUG": "INFO", "X": "a; b"})
    assert spec.env["NCCL_SOCKET_IFNAME"] == "ens5"
    assert spec.env["FI_PROVIDER"] == "efa"
    assert (spec.env["NCCL_DEBUG"], spec.env["X"]) == ("INFO", "a; b")
    (plain, _) = node_specs(plan(8), facts(), MEETING, "/r", "~/c", {})
    assert "FI_PROVIDER" not in plain.env
    assert not any("a; b" in word for word in spec.argv), "values never stand on a command line"


def test_first_agent_hears_all_and_the_others_hear_it() -> None:
    specs = node_specs(plan(0), facts(), MEETING, "/r", "~/c", {})
    told = [
        agent_spec(s, i, ["n0", "n1"], MEETING, run="/r", attempt=1, token="t", lease_s=15) for i, s in enumerate(specs)
    ]
    assert [spec["peers"] for spec in told] == [["n1"], ["n0"]]
    assert told[1]["lease"] == {"address": "10.0.0.1", "port": 29501, "token": "t", "seconds": 15}
    assert told[0]["run"] == "/r"


def test_mpirun_gets_slots_and_names_of_variables_but_no_values() -> None:
    backend = MpirunBackend("/p/python", ("n0", "n1"), "/ssh", ("10.0.0.1", 29500), "ens5", 8, {"SECRET": "a b"})
    (spec,) = backend.specs(plan(8), "/runs/x", "/code", console=False)
    line = " ".join(spec.argv)
    assert line.startswith("mpirun -np 16 -H n0:8,n1:8 ")
    assert "-x SECRET" in line
    assert "-x LOOPWORKS_RUN" in line
    assert "a b" not in line
    assert line.endswith("--wdir /code /p/python -m launch.mpi_rank")
    assert spec.env["SECRET"] == "a b"
    assert (spec.env["MASTER_ADDR"], spec.env["NCCL_SOCKET_IFNAME"]) == ("10.0.0.1", "ens5")


def test_ranks_of_open_mpi_get_the_names_that_torch_expects() -> None:
    given = {f"OMPI_COMM_WORLD_{name}": value for name, value in
             (("RANK", "5"), ("LOCAL_RANK", "1"), ("SIZE", "8"), ("LOCAL_SIZE", "4"))}  # fmt: skip
    assert rank_variables(given) == {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    with pytest.raises(KeyError):
        rank_variables({})
