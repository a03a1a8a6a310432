"""Money and health: budget, alarms, interruption and capacity-block events, sent by mail."""

from __future__ import annotations

import json
from typing import Any

import pulumi
import pulumi_aws as aws

from infra.components.compute import Compute
from infra.components.naming import CLUSTER_TAG, Naming
from infra.components.network import Network
from infra.config import ClusterConfig

SENDERS = ("budgets.amazonaws.com", "cloudwatch.amazonaws.com", "events.amazonaws.com")
# Two versions of AWS's page name the capacity block events differently; both are matched.
EVENTS = (
    "EC2 Spot Instance Interruption Warning",
    "EC2 Instance Rebalance Recommendation",
    "Capacity Block Expiration Warning",
    "Capacity Block Reservation Expiration Warning",
    "Capacity Block Delivered",
    "Capacity Block Reservation Delivered",
)
# A cluster whose S3 traffic goes through the gateway endpoint sends little else out; this is a mistake or a leak.
NAT_BYTES_PER_HOUR = 100 * 10**9


class Watch(pulumi.ComponentResource):
    """Budget and alarms; made where there is somebody to tell."""

    def __init__(self, config: ClusterConfig, network: Network, compute: Compute) -> None:
        self._naming = Naming.of(config)
        super().__init__("loopworks:aws:Watch", self._naming.name("watch"))
        self._config = config
        self._child = pulumi.ResourceOptions(parent=self)
        topic = self._topic()
        self._head_alarm(topic, compute)
        if config.nat_gateway and not config.gpu_public_ip:
            self._nat_alarm(topic, network)
        self._events(topic)
        if config.monthly_budget_usd:
            self._budget(topic)
        self.register_outputs({"topic": topic.arn})

    def _topic(self) -> aws.sns.Topic:
        naming = self._naming
        account = aws.get_caller_identity_output(opts=pulumi.InvokeOutputOptions(parent=self)).account_id
        # AWS's own SNS key cannot be used by alarms and budgets, so the topic has a key of its own.
        key = aws.kms.Key(
            naming.name("alerts"),
            description=f"Alerts of {self._config.name}",
            enable_key_rotation=True,
            deletion_window_in_days=7,
            policy=account.apply(key_policy),
            tags=naming.tags("alerts"),
            opts=self._child,
        )
        topic = aws.sns.Topic(
            naming.name("alerts"), kms_master_key_id=key.id, tags=naming.tags("alerts"), opts=self._child
        )
        policy = topic.arn.apply(topic_policy)
        aws.sns.TopicPolicy(naming.name("alerts"), arn=topic.arn, policy=policy, opts=self._child)
        for index, address in enumerate(self._config.alert_emails):
            aws.sns.TopicSubscription(
                naming.name(f"alerts-{index}"), topic=topic.arn, protocol="email", endpoint=address, opts=self._child
            )
        return topic

    def _alarm(self, part: str, topic: aws.sns.Topic, **arguments: Any) -> None:
        aws.cloudwatch.MetricAlarm(
            self._naming.name(part),
            comparison_operator="GreaterThanThreshold",
            alarm_actions=[topic.arn],
            treat_missing_data="notBreaching",
            tags=self._naming.tags(part),
            opts=self._child,
            **arguments,
        )

    def _head_alarm(self, topic: aws.sns.Topic, compute: Compute) -> None:
        self._alarm(
            "head-down",
            topic,
            alarm_description="The head node fails its status checks",
            namespace="AWS/EC2",
            metric_name="StatusCheckFailed",
            dimensions={"InstanceId": compute.head.id},
            statistic="Maximum",
            period=60,
            evaluation_periods=5,
            threshold=0,
        )

    def _nat_alarm(self, topic: aws.sns.Topic, network: Network) -> None:
        self._alarm(
            "nat-bytes",
            topic,
            alarm_description="Much traffic through the NAT gateway, which is billed by byte",
            namespace="AWS/NATGateway",
            metric_name="BytesOutToDestination",
            dimensions={"NatGatewayId": network.nat.id},
            statistic="Sum",
            period=3600,
            evaluation_periods=1,
            threshold=NAT_BYTES_PER_HOUR,
        )

    def _events(self, topic: aws.sns.Topic) -> None:
        naming = self._naming
        rule = aws.cloudwatch.EventRule(
            naming.name("interruptions"),
            description="Spot interruptions and capacity block events",
            event_pattern=json.dumps({"source": ["aws.ec2"], "detail-type": list(EVENTS)}),
            tags=naming.tags("interruptions"),
            opts=self._child,
        )
        aws.cloudwatch.EventTarget(naming.name("interruptions"), rule=rule.name, arn=topic.arn, opts=self._child)

    def _budget(self, topic: aws.sns.Topic) -> None:
        steps = (("ACTUAL", 50), ("ACTUAL", 80), ("ACTUAL", 100), ("FORECASTED", 100))
        notifications: list[Any] = [
            {
                "comparison_operator": "GREATER_THAN",
                "notification_type": kind,
                "threshold": percent,
                "threshold_type": "PERCENTAGE",
                "subscriber_sns_topic_arns": [topic.arn],
            }
            for kind, percent in steps
        ]
        aws.budgets.Budget(
            self._naming.name("monthly"),
            budget_type="COST",
            limit_amount=str(self._config.monthly_budget_usd),
            limit_unit="USD",
            time_unit="MONTHLY",
            cost_filters=[{"name": "TagKeyValue", "values": [f"user:{CLUSTER_TAG}${self._config.name}"]}],
            notifications=notifications,
            tags=self._naming.tags("monthly"),
            opts=self._child,
        )


def key_policy(account: str) -> str:
    """The account owns the key; the services that send alerts may use it."""
    owner = {
        "Effect": "Allow",
        "Principal": {"AWS": f"arn:aws:iam::{account}:root"},
        "Action": "kms:*",
        "Resource": "*",
    }
    senders = {
        "Effect": "Allow",
        "Principal": {"Service": list(SENDERS)},
        "Action": ["kms:Decrypt", "kms:GenerateDataKey"],
        "Resource": "*",
    }
    return json.dumps({"Version": "2012-10-17", "Statement": [owner, senders]})


def topic_policy(topic_arn: str) -> str:
    """The services that send alerts may publish; the account is read from the topic's own ARN."""
    account = topic_arn.split(":")[4]
    publish = {"Effect": "Allow", "Action": "sns:Publish", "Resource": topic_arn}
    own_account = {"StringEquals": {"aws:SourceAccount": account}}
    statements = [
        {**publish, "Principal": {"Service": list(SENDERS[:2])}, "Condition": own_account},
        {**publish, "Principal": {"Service": SENDERS[2]}},  # EventBridge supports no condition in a topic policy
    ]
    return json.dumps({"Version": "2012-10-17", "Statement": statements})
