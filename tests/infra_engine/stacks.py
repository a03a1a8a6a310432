"""Configurations for tests, and short ways to run the program with them."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import yaml

from infra.config import split_namespaces
from tests.infra_engine.engine import Engine, Result, stack_config
from tests.infra_engine.provider import AwsProvider

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "infra" / "__main__.py"
IMAGE = "ami-0123456789abcdef0"
PASSWORD = "correct-horse-battery-staple"
# Nothing is looked up: zone and images are given, so a preview needs no cloud at all.
OFFLINE: dict[str, Any] = {
    "region": "us-east-1",
    "accountChecks": False,
    "availabilityZone": "us-east-1a",
    "amiId": IMAGE,
    "headAmiId": IMAGE,
    "owner": "team",
    "allowedCidrs": ["203.0.113.0/24"],
    "alertEmails": ["ops@example.org"],
    "monthlyBudgetUsd": 1000,
    "redisPassword": PASSWORD,
}


def stack_file(stack: str) -> dict[str, Any]:
    """The values of infra/Pulumi.STACK.yaml with a password."""
    document = yaml.safe_load((ROOT / "infra" / f"Pulumi.{stack}.yaml").read_text(encoding="utf-8"))
    return {**split_namespaces(document["config"]), "redisPassword": PASSWORD}


def open_block() -> dict[str, Any]:
    """A capacity block of a week that is running now; blocks begin and end at 11:30 UTC."""
    noon = dt.datetime.now(dt.timezone.utc).replace(hour=11, minute=30, second=0, microsecond=0)
    stamps = [(noon + dt.timedelta(days=day)).strftime("%Y-%m-%dT%H:%M:%SZ") for day in (-2, 5)]
    return {
        "capacity": "capacity-block",
        "reservationId": "cr-0123456789abcdef0",
        "capacityBlockStart": stamps[0],
        "capacityBlockEnd": stamps[1],
    }


def as_config(values: dict[str, Any]) -> dict[str, Any]:
    """Values as the engine passes them, the password as a secret."""
    return stack_config(values, secrets=("redisPassword",))


class NoCloud(AwsProvider):
    """A provider for previews: it completes names and answers who is asking, and has nothing behind it."""

    def __init__(self) -> None:
        super().__init__(None)  # type: ignore[arg-type] - a preview creates nothing

    def invoke(self, token: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """A fixed account."""
        return {"accountId": "123456789012", "arn": "arn:aws:iam::123456789012:user/test", "id": "1", "userId": "1"}


def preview(overrides: dict[str, Any]) -> Result:
    """A preview of the offline configuration with some values changed."""
    return Engine(NoCloud()).preview(PROGRAM, as_config({**OFFLINE, **overrides}))
