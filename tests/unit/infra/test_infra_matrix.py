"""Each of 220 generated configurations is planned, or refused with a reason and a remedy. None crashes."""

from __future__ import annotations

import gc
import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pulumi_aws")
pytest.importorskip("moto")

import moto

from tests.infra_engine.aws_compute import template_data
from tests.infra_engine.engine import Result
from tests.infra_engine.launch_rules import check_interfaces, check_template
from tests.infra_engine.matrix import CHOICES, COUNT, configurations
from tests.infra_engine.policy import policy_resources, violations
from tests.infra_engine.stacks import preview
from tests.infra_engine.wire import decode

TEMPLATE = "aws:ec2/launchTemplate:LaunchTemplate"
SNAPSHOT = Path(moto.__file__).parent / "ec2" / "resources" / "instance_types.json.gz"


@pytest.fixture(scope="module")
def quick_runs():
    """Many short runs: without this, collecting the SDK's own objects again and again is most of the time."""
    preview({})
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def test_the_matrix_is_wide():
    seen = Counter((key, str(value)) for values in configurations() for key, value in values.items())
    assert {key for key, _ in seen} == set(CHOICES) | {"capacityBlockStart", "capacityBlockEnd"}
    assert len(seen) > 90


def check_plan(result: Result, types: dict[str, Any], values: dict[str, Any]) -> None:
    """What holds for every plan: templates within EC2's rules, no policy violated."""
    for request in result.requests.values():
        if request.type == TEMPLATE:
            data = template_data(decode(request.object))
            check_template(data)
            check_interfaces(data["NetworkInterfaces"], types[data["InstanceType"]]["NetworkInfo"])
    assert violations(policy_resources(result)) == [], values


def test_each_configuration_is_planned_or_refused(quick_runs):
    types = json.loads(gzip.decompress(SNAPSHOT.read_bytes()))
    reasons: Counter[str] = Counter()
    planned = 0
    for values in configurations():
        result = preview(values)
        assert result.crash == "", f"{values}\n{result.crash}"
        if result.error:
            assert "next:" in result.error and "error:" in result.error, f"{values}\n{result.error}"
            assert result.count("create") == 0, "nothing may be registered before the configuration is accepted"
            reasons.update(line.split(":")[1].strip() for line in result.error.splitlines() if " error: " in line)
            continue
        planned += 1
        check_plan(result, types, values)
    assert planned >= 40 and COUNT - planned >= 100, (planned, reasons)
    assert len(reasons) >= 15, reasons
