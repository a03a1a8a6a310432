"""A matrix of generated configurations: each is built, or refused with a reason and a remedy. None crashes."""

from __future__ import annotations

import gc
import random
from collections import Counter
from typing import Any

import pytest

pytest.importorskip("pulumi_aws")
pytest.importorskip("moto")

from infra.catalogue import instance_types
from tests.infra_engine.aws_compute import template_data
from tests.infra_engine.cloud import running_cloud
from tests.infra_engine.engine import Engine, Result
from tests.infra_engine.launch_rules import check_interfaces, check_template
from tests.infra_engine.policy import policy_resources, violations
from tests.infra_engine.provider import AwsProvider
from tests.infra_engine.stacks import OFFLINE, PROGRAM, as_config, open_block, preview
from tests.infra_engine.stand_ins import GPU_IMAGE, HEAD_IMAGE
from tests.infra_engine.wire import decode

pytestmark = pytest.mark.system
SEED, COUNT, BUILT_EVERY = 20261130, 220, 14
TEMPLATE = "aws:ec2/launchTemplate:LaunchTemplate"
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJhfOC1fzTgaLlPnOyFb9p6ukQd2SdzfMYm4Wq6Zx8aP you@example.org"
# Values that fit stand first; wrong ones are among the later.
CHOICES: dict[str, list[Any]] = {
    "instanceType": [*instance_types(), "p9.huge"],
    "nodeCount": [1, 2, 4, 0, 70, "three", -1],
    "elasticMax": [0, 0, 2],
    "elasticInstanceType": ["", "", "p5.48xlarge"],
    "capacity": ["on-demand", "spot", "reservation", "capacity-block"],
    "reservationId": ["", "", "cr-0123456789abcdef0"],
    "efa": ["auto", "auto", "never", "always"],
    "placementGroup": ["auto", "auto", "never", "always"],
    "gpuPublicIp": [False, False, False, True],
    "containers": [True, False],
    "sharedStorage": ["fsx-lustre", "efs", "nfs", "none"],
    "fsxDeployment": ["PERSISTENT_2", "PERSISTENT_2", "SCRATCH_2", "PERSISTENT_1"],
    "fsxCapacityGib": [1200, 2400, 4800, 1000],
    "fsxThroughput": [250, 125, 0, 333],
    "fsxS3Prefix": ["data", "", "/data"],
    "natGateway": [True, True, False],
    "interfaceEndpoints": [[], ["ssm", "ssmmessages", "ec2messages"], ["nothing"]],
    "flowLogs": [True],
    "allowedCidrs": [["203.0.113.0/24"], [], ["0.0.0.0/0"]],
    "sshPublicKey": ["", KEY, "not a key"],
    "ssm": [True, True, False],
    "headPublicIp": [True, True, False],
    "gpuSubnetCidr": ["10.40.0.0/20", "10.40.0.0/24", "10.40.0.0/28"],
    "dataOnDestroy": ["keep", "purge"],
    "kmsKeyArn": ["", "arn:aws:kms:us-east-1:123456789012:key/abc", "abc"],
    "redisPassword": ["correct-horse-battery-staple", "", "short"],
    "alertEmails": [["ops@example.org"], []],
    "monthlyBudgetUsd": [0, 1000],
}


def configurations() -> list[dict[str, Any]]:
    """The matrix: each configuration changes between 3 and 12 keys of one that fits."""
    generator = random.Random(SEED)
    made = []
    for _ in range(COUNT):
        keys = generator.sample(sorted(CHOICES), generator.randint(3, 12))
        values = {key: generator.choice(CHOICES[key]) for key in keys}
        if values.get("capacity") == "capacity-block" and generator.random() < 0.7:
            values |= open_block()
        made.append(values)
    return made


def test_the_matrix_is_wide():
    seen = Counter((key, str(value)) for values in configurations() for key, value in values.items())
    assert {key for key, _ in seen} == set(CHOICES) | {"capacityBlockStart", "capacityBlockEnd"}
    assert len(seen) > 90


@pytest.fixture(scope="module")
def cloud():
    preview({})
    gc.collect()
    gc.freeze()  # many short runs: collecting the SDK's own objects again and again is most of the time otherwise
    with running_cloud() as running:
        yield running
    gc.unfreeze()


def check_built(result: Result, network_of: dict[str, Any], values: dict[str, Any]) -> None:
    """What holds for every plan: templates within EC2's rules, no policy violated, no secret in outputs."""
    for request in result.requests.values():
        if request.type == TEMPLATE:
            data = template_data(decode(request.object))
            check_template(data)
            check_interfaces(data["NetworkInterfaces"], network_of[data["InstanceType"]])
    assert violations(policy_resources(result)) == [], values


def test_each_configuration_is_built_or_refused(cloud):
    described = cloud.client("ec2").describe_instance_types(InstanceTypes=list(instance_types()))["InstanceTypes"]
    network_of = {entry["InstanceType"]: entry["NetworkInfo"] for entry in described}
    reasons: Counter[str] = Counter()
    built = 0
    for index, values in enumerate(configurations()):
        result = preview(values)
        assert result.crash == "", f"{values}\n{result.crash}"
        if result.error:
            assert "next:" in result.error and "error:" in result.error, f"{values}\n{result.error}"
            assert result.count("create") == 0, "nothing may be registered before the configuration is accepted"
            reasons.update(line.split(":")[1].strip() for line in result.error.splitlines() if " error: " in line)
            continue
        built += 1
        check_built(result, network_of, values)
        if built % BUILT_EVERY == 0:
            apply_and_remove(cloud, values, index)
    assert built >= 50 and COUNT - built >= 100, (built, reasons)
    assert len(reasons) >= 15, reasons


def apply_and_remove(cloud: Any, values: dict[str, Any], index: int) -> None:
    """Build it over moto, see that a second run changes nothing, and take it away."""
    engine = Engine(AwsProvider(cloud))
    images = {"amiId": GPU_IMAGE, "headAmiId": HEAD_IMAGE, "name": f"matrix-{index}"}
    config = as_config({**OFFLINE, **values, **images})
    result = engine.up(PROGRAM, config)
    assert result.error == "", f"{values}\n{result.error}\n{result.crash}"
    again = engine.preview(PROGRAM, config)
    assert again.changes() == [], values
    engine.destroy(exclude_protected=True)
    assert {record.protect for record in engine.state.records.values()} <= {True}
