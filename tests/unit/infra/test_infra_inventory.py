"""The dynamic inventory: groups, connections, secrets, and what it says when the outputs are wrong."""

from __future__ import annotations

import copy
import importlib.util
import json
import subprocess
import sys

import jsonschema
import pytest

from tests.infra_engine.stacks import ROOT

SCRIPT = ROOT / "inventory" / "pulumi_stack.py"
SCHEMA = json.loads((ROOT / "inventory" / "stack-outputs.schema.json").read_text())
FACTS = {
    "instance_type": "p4d.24xlarge", "vcpus": 96, "memory_mib": 1179648, "gpu_name": "A100", "gpu_count": 8,
    "gpu_memory_mib": 40960, "efa_count": 4, "efa_gbps": 400, "efa_rdma_read": True, "efa_rdma_write": False,
    "nvme_count": 8, "nvme_gb": 1000,
}  # fmt: skip
OUTPUTS = {
    "contract_version": 1,
    "cluster": {"name": "lab", "provider": "aws", "region": "us-east-1", "availability_zone": "us-east-1a",
                "vpc_id": "vpc-1", "vpc_cidr": "10.40.0.0/16"},
    "access": {"mode": "bastion", "user": "ubuntu", "key_name": "k", "bastion_host": "198.51.100.7",
               "allowed_cidrs": ["203.0.113.0/24"]},
    "head": {"name": "lab-head", "instance_id": "i-0", "instance_type": "m7i.large", "private_ip": "10.40.240.4",
             "public_ip": "198.51.100.7"},
    "gpu_nodes": [{"name": "lab-gpu-0001", "instance_id": "i-1", "private_ip": "10.40.0.4"}],
    "gpu_node_facts": FACTS,
    "storage": {"kind": "efs", "source": "fs-1:/", "fstype": "nfs4", "options": "hard", "mount_point": "/shared",
                "id": "fs-1"},
    "checkpoints": {"bucket": "b", "url": "s3://b/checkpoints", "region": "us-east-1", "on_destroy": "keep"},
    "elastic": {"group": "", "max_nodes": 0},
    "queue": {"host": "10.40.240.4", "port": 6379, "password_parameter": "/lab/redis/password"},
    "redis_password": "[secret]",
}  # fmt: skip


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("pulumi_stack_inventory", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def changed(**parts):
    outputs = copy.deepcopy(OUTPUTS)
    for key, values in parts.items():
        outputs[key] = {**outputs[key], **values} if isinstance(values, dict) else values
    return outputs


def test_the_example_fits_the_schema():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(OUTPUTS, SCHEMA)


def test_groups_and_variables(script):
    made = script.inventory(OUTPUTS, [])
    assert made["head"]["hosts"] == ["lab-head"] and made["gpu_nodes"]["hosts"] == ["lab-gpu-0001"]
    assert made["efa"]["hosts"] == ["lab-gpu-0001"]
    node = made["_meta"]["hostvars"]["lab-gpu-0001"]
    assert node["ansible_host"] == node["loopworks_private_ip"] == "10.40.0.4"
    assert node["ansible_ssh_common_args"] == "-o ProxyJump=ubuntu@198.51.100.7"
    assert (node["loopworks_efa_count"], node["loopworks_gpu_count"]) == (4, 8)
    assert made["_meta"]["hostvars"]["lab-head"]["ansible_host"] == "198.51.100.7"
    shared = made["aws"]["vars"]
    assert shared["loopworks_checkpoint_url"] == "s3://b/checkpoints"
    assert shared["loopworks_storage"]["source"] == "fs-1:/"


def test_without_a_public_head_everything_goes_through_session_manager(script):
    outputs = changed(access={"mode": "ssm", "bastion_host": ""}, head={"public_ip": ""})
    hosts = script.inventory(outputs, [])["_meta"]["hostvars"]
    assert hosts["lab-head"]["ansible_host"] == "i-0" and hosts["lab-gpu-0001"]["ansible_host"] == "i-1"
    assert "aws ssm start-session --region us-east-1" in hosts["lab-head"]["ansible_ssh_common_args"]


def test_a_hidden_secret_is_no_variable(script):
    assert "loopworks_redis_password" not in script.shared_variables(OUTPUTS)
    shown = script.shared_variables(changed(redis_password="tiger-in-the-tank"))
    assert shown["loopworks_redis_password"] == "tiger-in-the-tank"


def test_nodes_without_efa_are_not_in_the_group(script):
    made = script.inventory(changed(gpu_node_facts={"efa_count": 0}), [])
    assert made["efa"]["hosts"] == []
    assert made["_meta"]["hostvars"]["lab-gpu-0001"]["loopworks_efa_enabled"] is False


def run(tmp_path, content, *arguments, **environment):
    path = tmp_path / "outputs.json"
    if content is not None:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        environment = {"LOOPWORKS_STACK_OUTPUTS": str(path), **environment}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env={"PATH": str(tmp_path), **environment},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_one_host(tmp_path):
    done = run(tmp_path, OUTPUTS, "--host", "lab-gpu-0001")
    assert json.loads(done.stdout)["ansible_user"] == "ubuntu"


def test_no_source_is_an_empty_inventory(tmp_path):
    done = run(tmp_path, None, "--list")
    assert done.returncode == 0 and json.loads(done.stdout) == {"_meta": {"hostvars": {}}}
    assert done.stderr == "", "Ansible would show it as an error, although hosts.yml may have the hosts"


WRONG = [
    ("not json", "is not JSON"),
    ({**OUTPUTS, "contract_version": 2}, "contract version 2, this inventory reads 1"),
    ({}, "contract version None"),
    ([], "contract version None"),
    ({key: value for key, value in OUTPUTS.items() if key != "head"}, "missing head"),
    ({**OUTPUTS, "queue": {"host": "h"}}, "missing queue.port, queue.password_parameter"),
]


@pytest.mark.parametrize(("content", "message"), WRONG)
def test_wrong_outputs_are_named(tmp_path, content, message):
    done = run(tmp_path, content, "--list")
    assert done.returncode == 2 and message in done.stderr and "next:" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_file_is_named(tmp_path):
    done = run(tmp_path, None, "--list", LOOPWORKS_STACK_OUTPUTS=str(tmp_path / "nothing.json"))
    assert done.returncode == 2 and "nothing.json" in done.stderr and "pulumi stack output" in done.stderr


def test_the_outputs_come_from_pulumi_where_it_is(tmp_path):
    fake = tmp_path / "pulumi"
    fake.write_text(f"#!{sys.executable}\nimport sys, json\nprint(json.dumps({OUTPUTS!r}))\n"
                    f"open({str(tmp_path / 'arguments')!r}, 'w').write(' '.join(sys.argv[1:]))\n")  # fmt: skip
    fake.chmod(0o755)
    done = run(tmp_path, None, "--list", LOOPWORKS_STACK="prod", LOOPWORKS_SHOW_SECRETS="1")
    assert json.loads(done.stdout)["head"]["hosts"] == ["lab-head"]
    asked = (tmp_path / "arguments").read_text()
    assert asked.startswith("stack output --json --cwd") and "--stack prod --show-secrets" in asked


def test_a_failing_pulumi_is_named(tmp_path):
    fake = tmp_path / "pulumi"
    fake.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('error: no stack selected')\n")
    fake.chmod(0o755)
    done = run(tmp_path, None, "--list")
    assert done.returncode == 2 and "no stack selected" in done.stderr
