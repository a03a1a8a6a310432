"""Elastic nodes of an AWS stack: a real Prometheus asks a stand-in of EC2 (moto) for them."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import yaml

pytest.importorskip("moto")

from tests.infra_engine.cloud import REGION, Cloud, running_cloud
from tests.system.conftest import CHECKOUT
from tests.system.monitoring_live import free_port, wait_for
from tests.unit.monitoring.tools import MONITORING, needs

pytestmark = [pytest.mark.system, needs("prometheus")]

GROUP, CLUSTER, PORTS = "lab-elastic", "lab", {"node": 9100, "gpu": 9400}


@pytest.fixture(scope="module")
def cloud() -> Iterator[Cloud]:
    """An account with an Auto Scaling group of two instances, and one instance that is not of it."""
    with running_cloud() as running:
        running.stand_ins.answer = partial(refused, running.stand_ins.answer)  # type: ignore[method-assign]
        ec2, scaling = running.client("ec2"), running.client("autoscaling")
        subnet = ec2.describe_subnets()["Subnets"][0]["SubnetId"]
        launch = {"ImageId": "ami-12345678", "InstanceType": "t3.micro"}
        ec2.run_instances(**launch, MinCount=1, MaxCount=1)
        ec2.create_launch_template(LaunchTemplateName="gpu", LaunchTemplateData=launch)
        scaling.create_auto_scaling_group(
            AutoScalingGroupName=GROUP,
            LaunchTemplate={"LaunchTemplateName": "gpu"},
            MinSize=0,
            MaxSize=4,
            DesiredCapacity=2,
            VPCZoneIdentifier=subnet,
        )
        yield running


def refused(otherwise: Callable[[str, bytes], Any], target: str, body: bytes) -> Any:
    """The head's instance profile (infra/components/elastic.py) allows one of the two questions of Prometheus."""
    if b"Action=DescribeAvailabilityZones" not in body:
        return otherwise(target, body)
    fault = "<Error><Code>UnauthorizedOperation</Code><Message>not allowed</Message></Error>"
    return 403, "text/xml", f"<Response><Errors>{fault}</Errors><RequestID>1</RequestID></Response>"


@pytest.fixture(scope="module")
def nodes(cloud: Cloud, monkeypatch_module: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The same nodes as the dynamic inventory names them."""
    for name, value in (("AWS_ENDPOINT_URL", cloud.url), ("AWS_ACCESS_KEY_ID", "t"), ("AWS_SECRET_ACCESS_KEY", "t")):
        monkeypatch_module.setenv(name, value)
    inventory = loaded("inventory/pulumi_stack.py")
    return list(inventory.elastic_nodes({"elastic": {"group": GROUP}, "cluster": {"name": CLUSTER, "region": REGION}}))


@pytest.fixture(scope="module")
def monkeypatch_module() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def prometheus(cloud: Cloud, nodes: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Prometheus with the configuration of a head; one of the nodes stands in the files of targets, too."""
    folder, port = tmp_path_factory.mktemp("elastic"), free_port()
    (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration(cloud)))
    for job, its_port in PORTS.items():
        (folder / "targets" / job).mkdir(parents=True)
        labels = {"cluster": CLUSTER, "node": nodes[0]["name"]}
        entry = [{"targets": [f"{nodes[0]['private_ip']}:{its_port}"], "labels": labels}]
        (folder / "targets" / job / "nodes.json").write_text(json.dumps(entry))
    command = ["prometheus", "--config.file=prometheus.yml", f"--web.listen-address=127.0.0.1:{port}"]
    with (folder / "log").open("w") as log, subprocess.Popen(command, cwd=folder, stdout=log, stderr=log) as server:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()


def configuration(cloud: Cloud) -> dict[str, Any]:
    """What the role writes, with the address of the stand-in and keys that it takes."""
    module = loaded("playbooks/roles/monitoring/filter_plugins/targets.py")
    elastic = {"cluster": CLUSTER, "region": REGION, "group": GROUP, "ports": PORTS}
    text = module.finding_elastic_nodes((MONITORING / "prometheus/prometheus.yml").read_text(), elastic)
    made: dict[str, Any] = yaml.safe_load(text)
    for job in made["scrape_configs"]:
        for question in job.get("ec2_sd_configs", ()):
            question |= {"endpoint": cloud.url, "access_key": "t", "secret_key": "t", "refresh_interval": "1s"}
    return made


def loaded(path: str) -> ModuleType:
    """A module of the checkout that is in no package."""
    spec = importlib.util.spec_from_file_location(
        path.rsplit("/", 1)[1].removesuffix(".py") + "_loaded", CHECKOUT / path
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def targets(address: str, job: str) -> list[tuple[str, dict[str, str]]]:
    """(URL, labels) of what Prometheus scrapes for a job."""
    try:
        with urllib.request.urlopen(f"{address}/api/v1/targets?state=active", timeout=5) as answer:
            found = json.load(answer)["data"]["activeTargets"]
    except OSError:
        return []
    return [(target["scrapeUrl"], target["labels"]) for target in found if target["labels"]["job"] == job]


def has(address: str, job: str, count: int) -> bool:
    """Whether a job has so many targets."""
    return len(targets(address, job)) == count


def test_elastic_nodes_are_found_once_and_named_as_in_the_inventory(
    prometheus: str, nodes: list[dict[str, Any]], cloud: Cloud
) -> None:
    assert len(nodes) == 2
    for job, port in PORTS.items():
        wait_for(partial(has, prometheus, job, 2), "targets of both nodes")
        assert sorted(targets(prometheus, job), key=lambda target: target[1]["node"]) == [
            (
                f"http://{node['private_ip']}:{port}/metrics",
                {"job": job, "instance": node["name"], "node": node["name"], "cluster": CLUSTER},
            )
            for node in nodes
        ]
    # The second was refused: without it only the zone's number is not known.
    asked = set(cloud.calls[cloud.calls.index("CreateAutoScalingGroup") + 1 :])
    assert asked == {"DescribeInstances", "DescribeAvailabilityZones"}


def test_a_node_that_was_ended_is_no_target_any_more(
    prometheus: str, nodes: list[dict[str, Any]], cloud: Cloud
) -> None:
    cloud.client("autoscaling").terminate_instance_in_auto_scaling_group(
        InstanceId=nodes[1]["instance_id"], ShouldDecrementDesiredCapacity=True
    )
    wait_for(partial(has, prometheus, "node", 1), "end of the target")
    assert targets(prometheus, "node")[0][1]["node"] == nodes[0]["name"]
