"""See the cluster without an account: `python -m tests.infra_engine.demo [--stack prod] [--nodes N]`.

Runs infra/__main__.py in the test engine over a moto server on a loopback port: the plan, what is made, the outputs,
the Ansible inventory made from them, the cost, a second plan with one node more, then destroy.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from infra.config import parse
from infra.cost import estimate, table
from infra.findings import EXIT_FAILED, EXIT_OK
from tests.infra_engine.aws_compute import stored_template
from tests.infra_engine.cloud import Cloud, running_cloud
from tests.infra_engine.engine import DestroyRefused, Engine, Result
from tests.infra_engine.policy import policy_resources, violations
from tests.infra_engine.provider import AwsProvider
from tests.infra_engine.stacks import PROGRAM, ROOT, as_config, stack_file

TEMPLATE = "aws:ec2/launchTemplate:LaunchTemplate"


def heading(text: str) -> None:
    """A line that separates the parts."""
    print(f"\n== {text} ==")


def short(type_token: str) -> str:
    """`ec2 Vpc` of `aws:ec2/vpc:Vpc`."""
    module, _, name = type_token.removeprefix("aws:").partition(":")
    return f"{module.split('/')[0]} {name}"


def show_plan(result: Result) -> None:
    """What will be made, by type."""
    counts = Counter((step.op, short(step.type)) for step in result.steps if step.type.startswith("aws:"))
    for (op, kind), count in sorted(counts.items(), key=lambda entry: entry[0]):
        print(f"  {op:<8} {count:>3}  {kind}")


def show_log(result: Result) -> None:
    """What the program said."""
    for level, text in result.logs:
        print(f"  {level}: {text}".replace("\n", "\n    "))


def show_resources(engine: Engine) -> None:
    """Everything that exists now, with its id."""
    for record in engine.state.records.values():
        if record.custom:
            guard = "  (protected)" if record.protect else ""
            print(f"  {short(record.type):<48} {record.name:<34} {record.id}{guard}")


def show_interfaces(cloud: Cloud, engine: Engine) -> None:
    """The interfaces of each launch template as the API keeps them."""
    for record in engine.state.records.values():
        if record.type == TEMPLATE:
            data = stored_template(cloud, record.id, "1")
            places = [
                f"card {entry['NetworkCardIndex']} device {entry['DeviceIndex']} {entry['InterfaceType']}"
                for entry in data["NetworkInterfaces"]
            ]
            print(f"  {record.name} ({data['InstanceType']}): {'; '.join(places)}")


def show_inventory(outputs: dict[str, Any]) -> None:
    """The inventory that Ansible would read, through ansible-inventory where it is installed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stack-outputs.json"
        path.write_text(json.dumps(outputs), encoding="utf-8")
        script = ROOT / "inventory" / "pulumi_stack.py"
        ansible = Path(sys.executable).with_name("ansible-inventory")
        environment = {**os.environ, "LOOPWORKS_STACK_OUTPUTS": str(path), "ANSIBLE_HOME": folder}
        node = next((entry["name"] for entry in outputs["gpu_nodes"]), outputs["head"]["name"])
        plain = [sys.executable, str(script)]
        commands = [[*plain, "--list"]]
        if ansible.exists():
            inventory = [str(ansible), "-i", str(script)]
            commands = [[*inventory, "--graph"], [*inventory, "--host", node, "--yaml"]]
        for command in commands:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
            print(done.stdout)


def show_destroy(engine: Engine) -> None:
    """Destroy, as a person would meet it: refused by the data first, then everything but the data."""
    try:
        engine.destroy()
    except DestroyRefused as refusal:
        print(f"  pulumi destroy: refused, {refusal}")
    else:
        print("  pulumi destroy: everything is gone, data included (dataOnDestroy: purge)")
        return
    steps = engine.destroy(exclude_protected=True)
    kept = [record.name for record in engine.state.records.values() if record.type == "aws:s3/bucket:Bucket"]
    print(f"  pulumi destroy --exclude-protected: {len(steps)} gone, kept: {', '.join(kept)} and what guards it")


def run(stack: str, nodes: int | None) -> int:
    """The whole demonstration; returns the exit code."""
    values = stack_file(stack)
    if nodes is not None:
        values["nodeCount"] = nodes
    config = as_config(values)
    with running_cloud() as cloud:
        engine = Engine(AwsProvider(cloud))
        heading(f"plan of stack {stack} (pulumi preview)")
        plan = engine.preview(PROGRAM, config)
        if plan.error:
            print(plan.error)
            return EXIT_FAILED
        show_plan(plan)
        show_log(plan)
        print(f"  policies: {violations(policy_resources(plan)) or 'nothing found'}")
        heading("what it costs")
        print(table(estimate(parse({k: v for k, v in values.items() if k != "redisPassword"}), today=dt.date.today())))
        heading("apply (pulumi up)")
        built = engine.up(PROGRAM, config)
        if built.error:
            print(built.error)
            return EXIT_FAILED
        show_resources(engine)
        heading("network interfaces in the launch templates")
        show_interfaces(cloud, engine)
        heading("stack outputs (pulumi stack output --json)")
        print(json.dumps(built.output_json(), indent=2, sort_keys=True))
        heading("inventory made from the outputs")
        show_inventory(built.output_json())
        heading("plan with one node more")
        more = engine.preview(PROGRAM, as_config({**values, "nodeCount": int(values.get("nodeCount", 2)) + 1}))
        for step in more.changes():
            print(f"  {step.op:<8} {step.name} {', '.join(step.changed)}".rstrip())
        heading("destroy")
        show_destroy(engine)
    print(
        "\nThis ran the program that `pulumi up` runs, against a local imitation of AWS. It proves the plan and the "
        "calls; permissions, capacity, quotas and images are only proven by a real account (docs/aws.md)."
    )
    return EXIT_OK


def main() -> int:
    """Command line entry."""
    parser = argparse.ArgumentParser(prog="python -m tests.infra_engine.demo", description=__doc__)
    parser.add_argument("--stack", default="prod", choices=("dev", "prod"))
    parser.add_argument("--nodes", type=int, help="GPU nodes instead of the stack's number")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    return run(arguments.stack, arguments.nodes)


if __name__ == "__main__":
    sys.exit(main())
