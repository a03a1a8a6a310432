"""When a node on which only a reboot helps is rebooted, and what is said where it is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from jinja2.nativetypes import NativeEnvironment

ROLES = Path(__file__).resolve().parents[3] / "playbooks/roles"
MODULE = "nvidia: another module is loaded"
EFA = "efa: another kernel module"


def decided(**variables: Any) -> dict[str, Any]:
    """The variables of role loopworks, as Ansible makes them of its vars."""
    environment = NativeEnvironment()
    values: dict[str, Any] = {
        "loopworks_reboot": "auto",
        **{name: value for name, value in variables.items() if name not in ("runs", "marks")},
    }
    values["ansible_facts"] = {
        "loopworks": {"runs": variables.get("runs", []), "reboot_due": variables.get("marks", [])}
    }
    for name, text in yaml.safe_load((ROLES / "loopworks/vars/main.yml").read_text()).items():
        values[name] = environment.from_string(text).render(values)
    return values


def test_all_reasons_are_one() -> None:
    assert decided(loopworks_reboot_reason=MODULE, marks=[EFA])["__loopworks_due"] == f"{MODULE}; {EFA}"
    assert decided(loopworks_reboot_reason="", marks=[EFA])["__loopworks_due"] == EFA
    assert decided(marks=[EFA])["__loopworks_due"] == EFA


@pytest.mark.parametrize(
    ("variables", "hindrance"),
    [
        ({}, ""),
        ({"runs": ["SLURM_JOB_ID=7"]}, "a run is on the node (SLURM_JOB_ID=7): upgrade.yml drains it first"),
        ({"runs": ["SLURM_JOB_ID=7"], "loopworks_reboot_drained": True}, ""),
        ({"runs": ["SLURM_JOB_ID=7"], "loopworks_reboot": "True"}, ""),
        ({"loopworks_reboot": False}, "loopworks_reboot is false"),
        ({"loopworks_reboot": "false", "loopworks_reboot_drained": True}, ""),
        ({"ansible_connection": "local"}, "this is a local connection: reboot by hand"),
    ],
)
def test_what_speaks_against_a_reboot(variables: dict[str, Any], hindrance: str) -> None:
    made = decided(**variables)
    assert made["__loopworks_hindrance"] == hindrance
    if "ansible_connection" in variables:
        assert made["__loopworks_is_local"] is True


def test_nodes_are_rebooted_in_one_place() -> None:
    found = [path.relative_to(ROLES) for path in ROLES.glob("*/tasks/*.yml") if "builtin.reboot:" in path.read_text()]
    assert found == [Path("loopworks/tasks/reboot.yml")]
