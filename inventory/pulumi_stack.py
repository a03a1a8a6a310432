#!/usr/bin/env python3
"""Dynamic inventory from the outputs of the infrastructure stack.

    ansible-inventory -i inventory/pulumi_stack.py --list
    ansible-playbook -i inventory/pulumi_stack.py playbooks/site.yml

Where the outputs come from, in this order:
    LOOPWORKS_STACK_OUTPUTS=FILE    a file made with `pulumi stack output --json > FILE`
    `pulumi stack output --json`    in infra/, of the selected stack or of LOOPWORKS_STACK, where pulumi is on PATH
Without both there are no hosts (said to a person at a terminal, not to Ansible: the hosts may stand in hosts.yml).

    LOOPWORKS_SHOW_SECRETS=1        pass secrets on (loopworks_redis_password)
    LOOPWORKS_ELASTIC=1             also list running nodes of the Auto Scaling group (needs boto3 and AWS credentials)

Needs nothing but Python. The shape of the outputs is stack-outputs.schema.json beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SCHEMA = HERE / "stack-outputs.schema.json"
INFRA = HERE.parent / "infra"
VERSION = 1
HIDDEN = "[secret]"
PULUMI_TIMEOUT_S = 120
EXIT_CONFIG = 2


class InventoryError(Exception):
    """The outputs cannot be had or do not fit the contract; says what to do next."""


def read_outputs(environment: dict[str, str]) -> dict[str, Any] | None:
    """The stack's outputs, or None where there is no source for them. Raises InventoryError where a source fails."""
    path = environment.get("LOOPWORKS_STACK_OUTPUTS")
    if path:
        try:
            return _parse(Path(path).read_text(encoding="utf-8"), path)
        except OSError as fault:
            raise InventoryError(
                f"LOOPWORKS_STACK_OUTPUTS: {fault}\n  next: make it with `pulumi stack output --json > {path}`"
            ) from None
    if shutil.which("pulumi", path=environment.get("PATH")) is None:
        return None
    command = pulumi_command(environment)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PULUMI_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise InventoryError(f"{' '.join(command)} gave no answer\n  next: run it by hand") from None
    if done.returncode:
        raise InventoryError(f"{' '.join(command)}: {done.stderr.strip()}\n  next: `cd infra && pulumi stack select`")
    return _parse(done.stdout, "pulumi stack output")


def pulumi_command(environment: dict[str, str]) -> list[str]:
    """The command that prints the outputs."""
    command = ["pulumi", "stack", "output", "--json", "--cwd", str(INFRA)]
    if environment.get("LOOPWORKS_STACK"):
        command += ["--stack", environment["LOOPWORKS_STACK"]]
    if environment.get("LOOPWORKS_SHOW_SECRETS") == "1":
        command.append("--show-secrets")
    return command


def _parse(text: str, source: str) -> dict[str, Any]:
    try:
        outputs = json.loads(text)
    except json.JSONDecodeError as fault:
        raise InventoryError(f"{source} is not JSON: {fault}\n  next: make it again") from None
    check_contract(outputs, source)
    return dict(outputs)


def check_contract(outputs: Any, source: str) -> None:
    """Raise InventoryError where the version is another or a required key is missing."""
    if not isinstance(outputs, dict) or outputs.get("contract_version") != VERSION:
        found = outputs.get("contract_version") if isinstance(outputs, dict) else None
        raise InventoryError(
            f"{source}: contract version {found}, this inventory reads {VERSION}\n"
            "  next: run `pulumi up` with this checkout, or use the checkout that made the stack"
        )
    missing = missing_keys(outputs, json.loads(SCHEMA.read_text(encoding="utf-8")))
    if missing:
        raise InventoryError(f"{source}: missing {', '.join(missing)}\n  next: run `pulumi up` to the end")


def missing_keys(value: dict[str, Any], schema: dict[str, Any], prefix: str = "") -> list[str]:
    """Required keys of the schema that the value lacks, one level of objects down."""
    missing = [f"{prefix}{key}" for key in schema.get("required", []) if key not in value]
    for key, part in schema.get("properties", {}).items():
        if isinstance(value.get(key), dict) and part.get("type") == "object":
            missing += missing_keys(value[key], part, f"{prefix}{key}.")
    return missing


def connection(outputs: dict[str, Any], host: dict[str, Any], *, is_head: bool) -> dict[str, str]:
    """How Ansible reaches a host: head by public address, nodes through it; in mode ssm all by Session Manager."""
    access = outputs["access"]
    variables = {"ansible_user": access["user"]}
    if access["mode"] == "ssm":
        region = outputs["cluster"]["region"]
        session = (
            f"aws ssm start-session --region {region} --target %h "
            "--document-name AWS-StartSSHSession --parameters portNumber=%p"
        )
        return {
            **variables,
            "ansible_host": host["instance_id"],
            "ansible_ssh_common_args": f"-o ProxyCommand='{session}'",
        }
    if is_head:
        return {**variables, "ansible_host": access["bastion_host"]}
    jump = f"-o ProxyJump={access['user']}@{access['bastion_host']}"
    return {**variables, "ansible_host": host["private_ip"], "ansible_ssh_common_args": jump}


def host_variables(
    outputs: dict[str, Any], host: dict[str, Any], facts: dict[str, Any] | None, *, is_head: bool
) -> dict[str, Any]:
    """All variables of one host. `facts` are the catalogue's facts of a GPU node's type."""
    variables: dict[str, Any] = {
        **connection(outputs, host, is_head=is_head),
        "loopworks_private_ip": host["private_ip"],
        "loopworks_instance_id": host["instance_id"],
    }
    if facts is None:
        return {**variables, "loopworks_instance_type": host["instance_type"]}
    variables |= {f"loopworks_{key}": value for key, value in facts.items()}
    return {**variables, "loopworks_efa_enabled": facts["efa_count"] > 0}


def shared_variables(outputs: dict[str, Any]) -> dict[str, Any]:
    """Variables of all hosts: cluster, storage, checkpoints, queue, networks."""
    cluster, queue = outputs["cluster"], outputs["queue"]
    variables = {
        "loopworks_cluster": cluster["name"],
        "loopworks_provider": cluster["provider"],
        "loopworks_region": cluster["region"],
        "loopworks_availability_zone": cluster["availability_zone"],
        "loopworks_cluster_cidr": cluster["vpc_cidr"],
        "loopworks_allowed_cidrs": outputs["access"]["allowed_cidrs"],
        "loopworks_storage": outputs["storage"],
        "loopworks_checkpoint_bucket": outputs["checkpoints"]["bucket"],
        "loopworks_checkpoint_url": outputs["checkpoints"]["url"],
        "loopworks_redis_host": queue["host"],
        "loopworks_redis_port": queue["port"],
        "loopworks_redis_password_parameter": queue["password_parameter"],
        "loopworks_elastic_group": outputs["elastic"]["group"],
        "loopworks_elastic_max_nodes": outputs["elastic"]["max_nodes"],
    }
    password = outputs.get("redis_password", HIDDEN)
    return variables if password == HIDDEN else {**variables, "loopworks_redis_password": password}


def inventory(outputs: dict[str, Any] | None, elastic: list[dict[str, Any]]) -> dict[str, Any]:
    """The inventory that Ansible reads: groups head, gpu_nodes, efa, elastic under aws, with all host variables."""
    if outputs is None:
        return {"_meta": {"hostvars": {}}}
    head, facts = outputs["head"], outputs["gpu_node_facts"]
    hosts = {head["name"]: host_variables(outputs, head, None, is_head=True)}
    fixed = [node["name"] for node in outputs["gpu_nodes"]]
    for node in outputs["gpu_nodes"]:
        hosts[node["name"]] = host_variables(outputs, node, facts, is_head=False)
    for node in elastic:
        hosts[node["name"]] = host_variables(outputs, node, outputs["elastic"]["node_facts"], is_head=False)
    extra = [node["name"] for node in elastic]
    with_efa = [name for name in [*fixed, *extra] if hosts[name]["loopworks_efa_enabled"]]
    return {
        "all": {"children": ["aws"]},
        "aws": {"children": ["head", "gpu_nodes"], "vars": shared_variables(outputs)},
        "head": {"hosts": [head["name"]]},
        "gpu_nodes": {"hosts": [*fixed, *extra]},
        "efa": {"hosts": with_efa},
        "elastic": {"hosts": extra},
        "_meta": {"hostvars": hosts},
    }


def elastic_nodes(outputs: dict[str, Any]) -> list[dict[str, Any]]:
    """Running instances of the Auto Scaling group. Raises InventoryError without boto3 or where AWS refuses."""
    group = outputs["elastic"]["group"]
    if not group:
        return []
    try:
        import boto3
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        raise InventoryError("LOOPWORKS_ELASTIC needs boto3\n  next: pip install boto3") from None
    filters = [
        {"Name": "tag:aws:autoscaling:groupName", "Values": [group]},
        {"Name": "instance-state-name", "Values": ["running"]},
    ]
    try:
        client = boto3.client("ec2", region_name=outputs["cluster"]["region"])
        pages = list(client.get_paginator("describe_instances").paginate(Filters=filters))
    except (BotoCoreError, ClientError) as fault:
        raise InventoryError(f"cannot list elastic nodes: {fault}\n  next: check AWS credentials") from None
    found = [item for page in pages for group_ in page["Reservations"] for item in group_["Instances"]]
    nodes = [
        {
            "name": f"{outputs['cluster']['name']}-elastic-{item['InstanceId'].removeprefix('i-')}",
            "instance_id": item["InstanceId"],
            "private_ip": item["PrivateIpAddress"],
        }
        for item in found
    ]
    return sorted(nodes, key=lambda node: node["name"])


def main(argv: list[str] | None = None) -> int:
    """Command line entry in the form that Ansible calls: --list or --host NAME."""
    parser = argparse.ArgumentParser(description="Ansible inventory from the stack outputs")
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--list", action="store_true", help="print the whole inventory")
    kind.add_argument("--host", metavar="NAME", help="print the variables of one host")
    arguments = parser.parse_args(argv)
    environment = dict(os.environ)
    try:
        outputs = read_outputs(environment)
        wanted = outputs is not None and environment.get("LOOPWORKS_ELASTIC") == "1"
        result = inventory(outputs, elastic_nodes(outputs) if outputs and wanted else [])
    except InventoryError as fault:
        print(fault, file=sys.stderr)
        return EXIT_CONFIG
    if outputs is None and sys.stderr.isatty():  # not to Ansible: hosts.yml beside this file may have the hosts
        print("no stack outputs: set LOOPWORKS_STACK_OUTPUTS, or install pulumi and select a stack", file=sys.stderr)
    print(json.dumps(result["_meta"]["hostvars"].get(arguments.host, {}) if arguments.host else result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
