"""Elastic nodes: an Auto Scaling group that the queue's scaler sets, never a load metric.

Scale-in protection is on for each instance, so only the scaler ends one, when it is drained and idle. Pulumi does not
touch the wanted number once the group exists. For a capacity block two schedules follow its start and end.
"""

from __future__ import annotations

import datetime as dt
from typing import Any

import pulumi
import pulumi_aws as aws

from infra.catalogue import instance_type
from infra.components.access import Access
from infra.components.compute import Compute
from infra.components.naming import CLUSTER_TAG, Naming
from infra.components.network import Network, policy_document
from infra.components.template import node_template
from infra.config import ClusterConfig
from infra.validate.capacity import parse_time

# AWS begins to end instances 30 minutes before the block's end and warns at 40; saving must have begun by then.
BLOCK_LEAD = dt.timedelta(minutes=45)


class Elastic(pulumi.ComponentResource):
    """`group`: the Auto Scaling group of the elastic nodes."""

    def __init__(
        self,
        config: ClusterConfig,
        network: Network,
        access: Access,
        compute: Compute,
        *,
        image_id: str,
        now: dt.datetime,
    ) -> None:
        naming = Naming.of(config)
        super().__init__("loopworks:aws:Elastic", naming.name("elastic"))
        self._config, self._naming = config, naming
        self._child = pulumi.ResourceOptions(parent=self)
        template = node_template(
            "elastic",
            config,
            instance_type(config.elastic_type),
            access,
            image_id=image_id,
            subnet_id=None,
            group=compute.placement,
            purchase=compute.purchase,
            parent=self,
        )
        self.group = self._group(network, template)
        access.allow_head("elastic", scaler_policy(config.name))
        if config.capacity == "capacity-block":
            self._schedules(now)
        self.register_outputs({"group": self.group.name})

    def _group(self, network: Network, template: aws.ec2.LaunchTemplate) -> aws.autoscaling.Group:
        config, naming = self._config, self._naming
        tags: list[Any] = [
            {"key": key, "value": value, "propagate_at_launch": True}
            for key, value in naming.tags("elastic", role="gpu").items()
        ]
        return aws.autoscaling.Group(
            naming.name("elastic"),
            min_size=0,
            max_size=config.elastic_max,
            desired_capacity=0,
            vpc_zone_identifiers=[network.gpu_subnet_id],
            launch_template={"id": template.id, "version": template.latest_version.apply(lambda n: str(int(n)))},
            health_check_type="EC2",
            protect_from_scale_in=True,
            capacity_rebalance=False,
            suspended_processes=["AZRebalance"],
            wait_for_capacity_timeout="0",
            force_delete=True,  # destroy must end protected instances too
            tags=tags,
            opts=pulumi.ResourceOptions(parent=self, ignore_changes=["desired_capacity"]),
        )

    def _schedules(self, now: dt.datetime) -> None:
        config = self._config
        start, end = parse_time(config.capacity_block_start), parse_time(config.capacity_block_end)
        if start > now:  # Auto Scaling refuses a start in the past
            self._schedule("block-start", start, config.elastic_max)
        self._schedule("block-end", end - BLOCK_LEAD, 0)

    def _schedule(self, part: str, moment: dt.datetime, count: int) -> None:
        aws.autoscaling.Schedule(
            self._naming.name(part),
            scheduled_action_name=self._naming.name(part),
            autoscaling_group_name=self.group.name,
            start_time=moment.strftime("%Y-%m-%dT%H:%M:%SZ"),
            time_zone="UTC",
            min_size=0,
            max_size=count,
            desired_capacity=count,
            opts=self._child,
        )


def scaler_policy(cluster: str) -> str:
    """What the scaler on the head may do: change this cluster's group, and look at groups and instances."""
    acting = {
        "Action": [
            "autoscaling:SetDesiredCapacity",
            "autoscaling:TerminateInstanceInAutoScalingGroup",
            "autoscaling:SetInstanceProtection",
        ],
        "Resource": "*",
        "Condition": {"StringEquals": {f"aws:ResourceTag/{CLUSTER_TAG}": cluster}},
    }
    looking = {
        "Action": ["autoscaling:DescribeAutoScalingGroups", "ec2:DescribeInstances"],
        "Resource": "*",
    }
    return policy_document(acting, looking)
