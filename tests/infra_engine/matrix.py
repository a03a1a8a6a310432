"""A matrix of generated configurations, the same in each run."""

from __future__ import annotations

import random
from typing import Any

from infra.catalogue import instance_types
from tests.infra_engine.stacks import open_block

SEED, COUNT = 20261130, 220
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJhfOC1fzTgaLlPnOyFb9p6ukQd2SdzfMYm4Wq6Zx8aP you@example.org"
# Values that fit stand first; wrong ones are among the later.
CHOICES: dict[str, list[Any]] = {
    "instanceType": [*instance_types(), "p9.huge"],
    "nodeCount": [1, 2, 4, 0, 9, "three", -1],
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
    "gpuSubnetCidr": ["10.40.0.0/20", "10.40.0.0/24", "10.40.0.0/28", "10.40.0.0/29"],
    "dataOnDestroy": ["keep", "purge"],
    "kmsKeyArn": ["", "arn:aws:kms:us-east-1:123456789012:key/abc", "abc"],
    "redisPassword": ["correct-horse-battery-staple", "", "short"],
    "alertEmails": [["ops@example.org"], []],
    "monthlyBudgetUsd": [0, 1000],
}


def configurations() -> list[dict[str, Any]]:
    """The matrix: each configuration changes between 4 and 12 keys of one that fits."""
    generator = random.Random(SEED)
    made = []
    for _ in range(COUNT):
        keys = generator.sample(sorted(CHOICES), generator.randint(4, 12))
        values = {key: generator.choice(CHOICES[key]) for key in keys}
        if values.get("capacity") == "capacity-block" and generator.random() < 0.7:
            values |= open_block()
        made.append(values)
    return made
