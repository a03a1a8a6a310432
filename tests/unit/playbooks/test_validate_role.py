"""The verdict over nodes: what is a finding, what the table says, who sums with whom."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.playbooks.plugins import load

ROLE = Path(__file__).resolve().parents[3] / "playbooks/roles/validate"


verdict = load("roles/validate/filter_plugins/verdict.py")
node = load("roles/validate/library/validate_node.py")
reach = load("roles/validate/library/validate_reach.py")
WANTED: dict[str, Any] = {"memlock": "unlimited", "nofile": 65536, "clock_s": 1.0}


def fault(check: str = "unit", message: str = "redis-server is failed") -> dict[str, str]:
    return {"check": check, "severity": "fail", "message": message}


def test_the_table_names_who_fails_what_and_who_is_fit() -> None:
    measured = {"check": "all-reduce", "severity": "info", "message": "9.00 GB/s by nccl"}
    lines = verdict.verdict_table({"n1": [measured], "n2": [fault()], "n3": []}, ["n4"], {"n1": [], "n2": []})
    assert lines[0].split() == ["n2", "FAIL", "unit", "redis-server", "is", "failed"]
    assert lines[1].startswith("n4  FAIL  playbook")
    assert lines[2].split()[:3] == ["n1", "ok", "all-reduce"]
    assert lines[-1] == "fit to train: n1, n3; unfit: 2"


def test_what_was_left_out_stands_once_with_its_nodes() -> None:
    skipped = {f"n{i:02}": ["efa: no EFA device is on PCI"] for i in range(20)}
    lines = verdict.verdict_table({name: [] for name in skipped}, [], skipped)
    left_out = [line for line in lines if line.startswith("left out")]
    assert len(left_out) == 1
    assert left_out[0].endswith("n11 and 8 more)")


def test_measurements_and_order_do_not_change_what_a_node_says_of_itself() -> None:
    first, second = fault("a"), fault("b")
    measured = {"check": "all-reduce", "severity": "info", "message": "1.23 GB/s"}
    assert verdict.lasting([second, measured, first]) == verdict.lasting([first, second]) == [first, second]
    assert verdict.is_fit([measured]) and not verdict.is_fit([measured, first])


@given(st.integers(2, 600))
def test_every_node_sums_in_exactly_one_group_of_two_or_three(count: int) -> None:
    names = [f"n{i:03}" for i in range(count)]
    groups = [verdict.bandwidth_group(names, name) for name in names]
    for first in {group["first"] for group in groups}:
        members = [group for group in groups if group["first"] == first]
        assert len(members) in (2, 3)
        assert sorted(group["rank"] for group in members) == list(range(members[0]["world"]))


def test_what_an_all_reduce_says() -> None:
    slow = {"rc": 0, "stdout": '{"backend": "gloo", "bytes_per_s": 2.5e9, "right": true}'}
    assert verdict.bandwidth_findings(slow, 0)[0] == {
        "check": "all-reduce",
        "severity": "info",
        "message": "2.50 GB/s by gloo",
    }
    assert verdict.bandwidth_findings(slow, 10)[0]["severity"] == "fail"
    assert verdict.bandwidth_findings({"rc": 1, "stderr": "boom\n"}, 0)[0]["message"].startswith("boom")
    assert verdict.bandwidth_findings({"skipped": True}, 0) == verdict.bandwidth_findings({}, 0) == []


def test_a_unit_that_is_not_there_names_its_playbook() -> None:
    found = node.unit_findings({"ssh": ("loaded", "active"), "redis-server": ("not-found", "inactive")})
    assert [item["message"] for item in found] == ["redis-server is not installed: run redis.yml"]
    assert node.unit_findings({"nginx": ("loaded", "failed")})[0]["severity"] == "fail"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((0, '{"torch": "2.13.0+cpu", "deepspeed": "0.19.8", "gpus": 0}', ""), None),
        ((0, 'noise\n{"torch": "2.12.0", "deepspeed": "0.19.8", "gpus": 0}', ""), "torch is 2.12.0"),
        ((1, "", "Traceback\nModuleNotFoundError: No module named 'torch'\n"), "No module named 'torch'"),
        ((None, "", "no answer within 180 s"), "no answer within 180 s"),
    ],
)
def test_python_is_what_constraints_say(answer: tuple[int | None, str, str], message: str | None) -> None:
    found = node.python_findings(answer, {"torch": "2.13.0", "deepspeed": "0.19.8"}, 0)
    assert (not found) if message is None else (message in found[0]["message"])


def test_gpus_that_torch_does_not_see_are_a_fault() -> None:
    answer = (0, '{"torch": "2.13.0", "deepspeed": "0.19.8", "gpus": 7}', "")
    assert node.python_findings(answer, {}, 8)[0]["message"] == "torch sees 7 GPUs of 8"


def test_pins_with_a_marker_count_from_python_3_11() -> None:
    text = 'deepspeed==0.19.8; python_version >= "3.11"\ntorch==2.13.0\ntorchvision==1\n'
    assert node.pinned(text, (3, 11)) == {"deepspeed": "0.19.8", "torch": "2.13.0"}
    assert node.pinned(text, (3, 10)) == {"torch": "2.13.0"}


def test_storage_that_is_not_shared_is_a_fault_only_where_it_should_be() -> None:
    answer = (0, '{"written": "", "read": false}', "")
    assert node.shared_findings(answer, "/shared", True)[0]["severity"] == "fail"
    assert node.shared_findings(answer, "/shared", False)[0]["severity"] == "warning"
    assert node.shared_findings((None, "", ""), "/shared", False)[0]["severity"] == "fail"
    assert node.shared_findings((0, '{"written": "", "read": true}', ""), "/shared", True) == []


def test_the_word_of_the_head_is_looked_for_among_the_runs(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/.validate-abc").write_text("abc")
    command = [sys.executable, "-c", node.SHARED, tmp_path, "abc"]
    told = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=30).stdout)
    assert told == {"written": "", "read": True}
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [".validate-abc"], "nothing of its own stays"


def test_a_shared_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    quick = node.SHARED.replace("+ 8", "+ 0.1")
    command = [sys.executable, "-c", quick, tmp_path / "none", "abc"]
    told = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=30).stdout)
    assert "No such file" in told["written"] and told["read"] is False


@pytest.mark.parametrize(
    ("package", "is_right"),
    [
        ("nvidia-fabricmanager 580.126.09-1", True),
        ("nvidia-fabricmanager-580 580.126.09-0ubuntu0.24.04.1", True),
        ("nvidia-fabricmanager 1:580.126.09-1", True),
        ("nvidia-fabricmanager 580.126.08-1", False),
        ("nvidia-fabricmanager 580.126.0-1", False),
    ],
)
def test_fabric_manager_is_the_driver_s_version_to_the_last_digit(package: str, is_right: bool) -> None:
    assert (node.fabric_manager_findings("580.126.09", package) == []) is is_right


def test_health_keeps_its_words() -> None:
    report = {"checks": {"disk": "warning", "efa": "failed", "clock": "ok"}, "messages": {"disk": "8.0% of / is free"}}
    found = node.health_findings(report)
    assert [(item["check"], item["severity"]) for item in found] == [("disk", "warning"), ("efa", "fail")]


@pytest.mark.parametrize(
    ("words", "checks"),
    [
        (("unlimited", "1048576", "100.5"), []),
        (("8192", "1048576", "100.5"), ["memlock"]),
        (("unlimited", "1024", "100.5"), ["nofile"]),
        (("unlimited", "unlimited", "100.5"), []),
        (("unlimited", "1048576", "103.0"), ["clock"]),
        (("unlimited", "1048576", "97.0"), ["clock"]),
    ],
)
def test_a_session_says_its_limits_and_its_clock(words: tuple[str, str, str], checks: list[str]) -> None:
    found = reach.session_findings(words, 100.0, 101.0, WANTED, False)
    assert [(item["check"], item["severity"]) for item in found] == [(check, "fail") for check in checks]


def test_in_a_container_limits_are_a_warning() -> None:
    found = reach.session_findings(("8192", "20000", "100"), 100.0, 100.0, WANTED, True)
    assert {item["severity"] for item in found} == {"warning"}


def test_a_login_asks_nothing() -> None:
    command = " ".join(reach.login_command("loopworks", "gpu01"))
    assert "BatchMode=yes" in command and "StrictHostKeyChecking=yes" in command
