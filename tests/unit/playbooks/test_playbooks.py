"""What holds for all playbooks and roles."""

from __future__ import annotations

import configparser
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
PLAYBOOKS = sorted((ROOT / "playbooks").glob("*.yml"))
ROLES = sorted(path for path in (ROOT / "playbooks/roles").iterdir() if path.is_dir())
EXAMPLES = sorted(path for path in (ROOT / "inventory/examples").iterdir() if path.is_dir())
BIN = Path(sys.executable).parent


def ansible(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "ANSIBLE_NOCOLOR": "1", **environment}
    argv = [str(BIN / command[0]), *command[1:]]
    return subprocess.run(
        argv, cwd=ROOT / "playbooks", env=env, capture_output=True, text=True, timeout=120, check=False
    )


def settings(path: Path) -> dict[str, dict[str, str]]:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(path)
    return {name: dict(parser[name]) for name in parser.sections()}


def test_both_configurations_say_the_same() -> None:
    inner, outer = settings(ROOT / "playbooks/ansible.cfg"), settings(ROOT / "ansible.cfg")
    assert outer["defaults"].pop("inventory") == "inventory"
    assert inner["defaults"].pop("inventory") == "../inventory"
    assert outer["defaults"].pop("roles_path") == "playbooks/roles"
    assert inner["defaults"].pop("roles_path") == "roles"
    assert inner == outer


def test_every_playbook_has_good_syntax() -> None:
    names = [path.name for path in PLAYBOOKS]
    done = ansible("ansible-playbook", "-i", "../inventory/examples/private", "--syntax-check", *names)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr, done.stderr


def test_site_imports_every_concern() -> None:
    imported = {
        entry["ansible.builtin.import_playbook"] for entry in yaml.safe_load((ROOT / "playbooks/site.yml").read_text())
    }
    other = {"site.yml", "check.yml", "upgrade.yml", "teardown.yml", "add-node.yml"}
    assert imported == {path.name for path in PLAYBOOKS} - other


def test_every_playbook_checks_the_inventory_first() -> None:
    for path in PLAYBOOKS:
        if path.name != "check.yml":
            first = yaml.safe_load(path.read_text())[0]["ansible.builtin.import_playbook"]
            assert first in ("check.yml", "base.yml"), path.name


@pytest.mark.parametrize("role", ROLES, ids=lambda path: path.name)
def test_a_role_specifies_and_explains_each_variable(role: Path) -> None:
    options = yaml.safe_load((role / "meta/argument_specs.yml").read_text())["argument_specs"]["main"]["options"]
    path = role / "defaults/main.yml"
    defaults = (yaml.safe_load(path.read_text()) or {}) if path.exists() else {}
    assert set(defaults) <= set(options), f"without a specification: {sorted(set(defaults) - set(options))}"
    for name, option in options.items():
        assert option.get("description") and option.get("type"), name
        written = defaults.get(name)
        if "default" in option and name in defaults and "{{" not in str(written):
            assert option["default"] == written, name
    assert (role / "README.md").exists()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_examples_list(example: Path) -> None:
    outputs = example / "outputs.json"
    inventory = ROOT / "inventory/pulumi_stack.py" if outputs.exists() else example
    done = ansible("ansible-inventory", "-i", str(inventory), "--list", LOOPWORKS_STACK_OUTPUTS=str(outputs))
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    listed = json.loads(done.stdout)
    assert len(listed["head"]["hosts"]) == 1
    assert listed["gpu_nodes"]["hosts"]


def test_an_empty_inventory_is_refused_with_what_to_do() -> None:
    done = ansible("ansible-playbook", "site.yml", PATH="/usr/bin:/bin")
    assert done.returncode != 0
    assert "group head: it has no host" in done.stdout + done.stderr
    assert "inventory/examples/private" in done.stdout + done.stderr
    assert "UNREACHABLE" not in done.stdout


# Facts of the role loopworks that a run itself, or somebody during it, may change.
CHANGING = (
    *("drained", "file_systems", "infiniband", "lustre_module", "nfs_module", "nouveau_loaded"),
    *("nvidia_module_version", "nvml_gpu_count", "nvml_version", "reboot_due", "runs"),
)
CHANGING_FACT = re.compile(r"ansible_facts(?:\['loopworks'\]\['|\.loopworks\.)({})\b".format("|".join(CHANGING)))


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_a_role_that_decides_by_what_may_have_changed_looks_again(role: Path) -> None:
    files = [path for kind in ("yml", "j2") for path in role.rglob(f"*.{kind}")]
    used = {fact for path in files for fact in CHANGING_FACT.findall(path.read_text())}
    dependencies = yaml.safe_load((role / "meta/main.yml").read_text())["dependencies"]
    looks = {"role": "loopworks", "loopworks_look_again": True} in dependencies
    assert looks or not used or role.name == "loopworks", (
        f"{role.name} decides by {sorted(used)} as they were at the start"
    )
