"""Ways to buy capacity, and the rarer parts of a cluster, built over moto: blocks, spot, EFS, Session Manager only.

And some of the generated matrix, from up to destroy.
"""

from __future__ import annotations

import datetime as dt
import json
from typing import Any

import pytest

pytest.importorskip("pulumi_aws")
pytest.importorskip("moto")

from infra.config import parse
from infra.findings import InfraError, errors_of
from infra.validate import check_config
from tests.infra_engine.aws_compute import stored_template
from tests.infra_engine.cloud import running_cloud
from tests.infra_engine.engine import Engine, Result
from tests.infra_engine.matrix import configurations
from tests.infra_engine.provider import AwsProvider
from tests.infra_engine.stacks import OFFLINE, PROGRAM, as_config, open_block
from tests.infra_engine.stand_ins import GPU_IMAGE, HEAD_IMAGE

pytestmark = pytest.mark.system
TEMPLATE = "aws:ec2/launchTemplate:LaunchTemplate"
GROUP = "aws:ec2/placementGroup:PlacementGroup"


@pytest.fixture(scope="module")
def cloud():
    with running_cloud() as running:
        yield running


def build(cloud: Any, overrides: dict[str, Any]) -> tuple[Engine, Result]:
    engine = Engine(AwsProvider(cloud))
    images = {"amiId": GPU_IMAGE, "headAmiId": HEAD_IMAGE}
    result = engine.up(PROGRAM, as_config({**OFFLINE, **images, **overrides}))
    assert result.error == "", result.crash
    return engine, result


def one(engine: Engine, type_token: str) -> Any:
    found = [record for record in engine.state.records.values() if record.type == type_token]
    assert len(found) == 1, [record.name for record in found]
    return found[0]


def test_a_block_that_begins_later_starts_and_stops_by_schedule(cloud):
    now = dt.datetime.now(dt.timezone.utc).replace(hour=11, minute=30, second=0, microsecond=0)
    start, end = now + dt.timedelta(days=2), now + dt.timedelta(days=9)
    engine, result = build(cloud, {
        "name": "block", "instanceType": "p5.48xlarge", "capacity": "capacity-block", "nodeCount": 0, "elasticMax": 4,
        "capacityBlockOfferingId": "cbr-0123456789abcdef0", "confirmCapacityBlockPurchase": True,
        "capacityBlockStart": f"{start:%Y-%m-%dT%H:%M:%SZ}", "capacityBlockEnd": f"{end:%Y-%m-%dT%H:%M:%SZ}",
    })  # fmt: skip
    assert cloud.calls.count("PurchaseCapacityBlock") == 1
    assert not [record for record in engine.state.records.values() if record.type == GROUP]
    elastic = next(
        record
        for record in engine.state.records.values()
        if record.name == "block-elastic" and record.id.startswith("lt-")
    )
    data = stored_template(cloud, elastic.id, "1")
    assert data["InstanceMarketOptions"] == {"MarketType": "capacity-block"}
    target = data["CapacityReservationSpecification"]["CapacityReservationTarget"]["CapacityReservationId"]
    assert cloud.stand_ins.reservations[target]["offering"] == "cbr-0123456789abcdef0"
    actions = cloud.client("autoscaling").describe_scheduled_actions(
        AutoScalingGroupName=result.outputs["elastic"]["group"]
    )["ScheduledUpdateGroupActions"]
    planned = {action["ScheduledActionName"]: (action["StartTime"], action["DesiredCapacity"]) for action in actions}
    lead = (end - planned["block-block-end"][0]).total_seconds()
    assert planned["block-block-start"] == (start, 4)
    assert planned["block-block-end"][1] == 0 and lead > 30 * 60, "AWS ends instances 30 minutes before the end"
    # What was paid for is neither destroyed nor bought again.
    engine.destroy(exclude_protected=True)
    again = engine.preview(PROGRAM, as_config({**OFFLINE, "name": "other"}))
    assert target in cloud.stand_ins.reservations and again.error == ""


def test_a_running_block_takes_fixed_nodes(cloud):
    engine, _ = build(cloud, {"name": "running", "instanceType": "p5e.48xlarge", "nodeCount": 2, **open_block()})
    data = stored_template(cloud, one(engine, TEMPLATE).id, "1")
    assert "GroupName" not in data.get("Placement", {}) and len(data["NetworkInterfaces"]) == 33


def test_on_demand_never_falls_into_somebody_elses_reservation(cloud):
    engine, _ = build(cloud, {"name": "plain", "nodeCount": 1, "sharedStorage": "none"})
    data = stored_template(cloud, one(engine, TEMPLATE).id, "1")
    assert data["CapacityReservationSpecification"]["CapacityReservationPreference"] == "none"
    assert "InstanceMarketOptions" not in data
    assert data["Placement"]["GroupName"] == one(engine, GROUP).id


def test_one_card_types_may_have_a_public_address(cloud):
    engine, _ = build(cloud, {"name": "public", "instanceType": "g5.48xlarge", "nodeCount": 1, "gpuPublicIp": True,
                              "sharedStorage": "none", "capacity": "spot"})  # fmt: skip
    data = stored_template(cloud, one(engine, TEMPLATE).id, "1")
    (only,) = data["NetworkInterfaces"]
    assert only["AssociatePublicIpAddress"] is True and only["InterfaceType"] == "efa" and len(only["Groups"]) == 2
    assert data["InstanceMarketOptions"]["SpotOptions"]["SpotInstanceType"] == "one-time"


def test_efs_and_session_manager_only(cloud):
    engine, result = build(cloud, {
        "name": "quiet", "instanceType": "g6e.xlarge", "nodeCount": 1, "sharedStorage": "efs", "headPublicIp": False,
        "allowedCidrs": [], "natGateway": False, "containers": False,
        "interfaceEndpoints": ["ssm", "ssmmessages", "ec2messages"],
    })  # fmt: skip
    assert result.outputs["access"]["mode"] == "ssm" and result.outputs["access"]["bastion_host"] == ""
    assert result.outputs["storage"]["fstype"] == "nfs4"
    addresses = [record for record in engine.state.records.values() if record.type.endswith(":Eip")]
    assert addresses == [], "nothing has a public address"
    data = stored_template(cloud, one(engine, TEMPLATE).id, "1")
    assert data["MetadataOptions"]["HttpPutResponseHopLimit"] == 1
    assert one(engine, "aws:efs/fileSystem:FileSystem").protect


def test_roles_have_least_rights(cloud):
    engine, result = build(cloud, {"name": "rights", "nodeCount": 1, "elasticMax": 1, "sharedStorage": "none"})
    policies = {
        record.name: json.loads(record.inputs["policy"])["Statement"]
        for record in engine.state.records.values()
        if record.type == "aws:iam/rolePolicy:RolePolicy"
    }
    bucket = result.outputs["checkpoints"]["bucket"]
    for statement in policies["rights-gpu-bucket"]:
        assert str(statement["Resource"]).startswith(f"arn:aws:s3:::{bucket}")
    acting = policies["rights-head-elastic"][0]
    assert acting["Condition"] == {"StringEquals": {"aws:ResourceTag/loopworks:cluster": "rights"}}
    (secret,) = policies["rights-head-redis"]
    assert secret["Action"] == ["ssm:GetParameter"] and secret["Resource"].endswith(":parameter/rights/redis/password")
    assert not [name for name in policies if name.startswith("rights-gpu-") and name != "rights-gpu-bucket"]


def accepted() -> list[dict[str, Any]]:
    """The configurations of the matrix that validation accepts."""
    found = []
    for values in configurations():
        try:
            findings = check_config(parse({**OFFLINE, **values}), now=dt.datetime.now(dt.timezone.utc))
        except InfraError:
            continue
        if not errors_of(findings):
            found.append(values)
    return found


@pytest.mark.parametrize("index", [0, 1, 2, 3])
def test_generated_configurations_are_built_and_taken_away(cloud, index):
    candidates = accepted()
    values = {**candidates[index * len(candidates) // 4], "name": f"matrix-{index}"}
    engine, _ = build(cloud, values)
    again = engine.preview(PROGRAM, as_config({**OFFLINE, "amiId": GPU_IMAGE, "headAmiId": HEAD_IMAGE, **values}))
    assert again.error == "" and again.changes() == [], values
    engine.destroy(exclude_protected=True)
    assert all(record.protect for record in engine.state.records.values())
