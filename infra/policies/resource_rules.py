"""Policies about one resource at a time. They cover what checkov and AWS Config ask of the same resources."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pulumi_policy import ResourceValidationArgs, ResourceValidationPolicy

Report = Callable[..., None]
Check = Callable[[str, Mapping[str, Any]], Iterator[str]]

WORLD = ("0.0.0.0/0", "::/0")
INGRESS = "aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule"
GROUP = "aws:ec2/securityGroup:SecurityGroup"
TEMPLATE = "aws:ec2/launchTemplate:LaunchTemplate"
INSTANCE = "aws:ec2/instance:Instance"
BUCKET = "aws:s3/bucket:Bucket"
REQUIRED_TAGS = ("loopworks:cluster", "Owner", "ManagedBy")
# Types that take tags as a mapping and are made by this project.
TAGGED = (
    "aws:ec2/vpc:Vpc",
    "aws:ec2/subnet:Subnet",
    "aws:ec2/internetGateway:InternetGateway",
    "aws:ec2/routeTable:RouteTable",
    "aws:ec2/natGateway:NatGateway",
    "aws:ec2/eip:Eip",
    "aws:ec2/vpcEndpoint:VpcEndpoint",
    "aws:ec2/flowLog:FlowLog",
    "aws:ec2/keyPair:KeyPair",
    "aws:ec2/placementGroup:PlacementGroup",
    "aws:ec2/capacityReservation:CapacityReservation",
    "aws:ec2/capacityBlockReservation:CapacityBlockReservation",
    "aws:ebs/volume:Volume",
    "aws:efs/fileSystem:FileSystem",
    "aws:fsx/lustreFileSystem:LustreFileSystem",
    "aws:fsx/dataRepositoryAssociation:DataRepositoryAssociation",
    "aws:iam/role:Role",
    "aws:iam/instanceProfile:InstanceProfile",
    "aws:kms/key:Key",
    "aws:sns/topic:Topic",
    "aws:cloudwatch/logGroup:LogGroup",
    "aws:cloudwatch/metricAlarm:MetricAlarm",
    "aws:cloudwatch/eventRule:EventRule",
    "aws:budgets/budget:Budget",
    "aws:ssm/parameter:Parameter",
    GROUP,
    TEMPLATE,
    INSTANCE,
    BUCKET,
)
HOLDS_DATA = (
    BUCKET,
    "aws:efs/fileSystem:FileSystem",
    "aws:ebs/volume:Volume",
    "aws:fsx/lustreFileSystem:LustreFileSystem",
)


def true(value: Any) -> bool:
    """Whether a flag is set; launch templates write flags as text."""
    return value is True or value == "true"


def open_ports(type_token: str, props: Mapping[str, Any]) -> Iterator[str]:
    """No ingress from the whole world."""
    if type_token == INGRESS:
        for key in ("cidrIpv4", "cidrIpv6"):
            if props.get(key) in WORLD:
                yield f"ports {props.get('fromPort')}-{props.get('toPort')} are open to {props[key]}"
    if type_token == GROUP and (props.get("ingress") or props.get("egress")):
        yield "rules inside the group: use rules of their own, which do not delete each other"
    if type_token == "aws:ec2/defaultSecurityGroup:DefaultSecurityGroup" and (
        props.get("ingress") or props.get("egress")
    ):
        yield "the VPC's default group must stay without rules"


def public_addresses(type_token: str, props: Mapping[str, Any]) -> Iterator[str]:
    """No public address by default, and none beside several interfaces."""
    if type_token == "aws:ec2/subnet:Subnet" and props.get("mapPublicIpOnLaunch"):
        yield "the subnet gives every instance a public address"
    interfaces = props.get("networkInterfaces") or []
    if type_token == TEMPLATE and len(interfaces) > 1:
        for entry in interfaces:
            if true(entry.get("associatePublicIpAddress")):
                yield "a public address needs a launch with one interface"


def encryption(type_token: str, props: Mapping[str, Any]) -> Iterator[str]:
    """Everything at rest is encrypted."""
    if type_token == TEMPLATE:
        for mapping in props.get("blockDeviceMappings") or []:
            if not true(mapping.get("ebs", {}).get("encrypted")):
                yield f"disk {mapping.get('deviceName')} is not encrypted"
    # A node started from a template has its disks from there.
    if type_token == INSTANCE and not props.get("launchTemplate"):
        disk = props.get("rootBlockDevice") or {}
        if not true(disk.get("encrypted")):
            yield "the root disk is not encrypted"
    if type_token in ("aws:ebs/volume:Volume", "aws:efs/fileSystem:FileSystem") and not true(props.get("encrypted")):
        yield "is not encrypted"
    if type_token == "aws:sns/topic:Topic" and not props.get("kmsMasterKeyId"):
        yield "the topic has no key"
    if type_token == "aws:kms/key:Key" and not props.get("enableKeyRotation"):
        yield "the key is not rotated"
    if type_token == "aws:ssm/parameter:Parameter" and props.get("type") != "SecureString":
        yield "the parameter is not a SecureString"


def metadata_service(type_token: str, props: Mapping[str, Any]) -> Iterator[str]:
    """IMDSv2 only, at most two hops."""
    from_template = type_token == INSTANCE and props.get("launchTemplate")
    if type_token not in (TEMPLATE, INSTANCE) or from_template:
        return
    options = props.get("metadataOptions") or {}
    if options.get("httpTokens") != "required":
        yield "the metadata service answers without a token"
    if (options.get("httpPutResponseHopLimit") or 1) > 2:
        yield "the metadata service answers over more than two hops"


def public_buckets(type_token: str, props: Mapping[str, Any]) -> Iterator[str]:
    """No bucket is public."""
    if type_token == "aws:s3/bucketPublicAccessBlock:BucketPublicAccessBlock":
        for key in ("blockPublicAcls", "blockPublicPolicy", "ignorePublicAcls", "restrictPublicBuckets"):
            if not props.get(key):
                yield f"{key} is off"
    if type_token == BUCKET and str(props.get("acl") or "private").startswith("public"):
        yield "the bucket's ACL is public"
    if type_token == "aws:s3/bucketPolicy:BucketPolicy":
        for statement in statements(props.get("policy")):
            if statement.get("Effect") == "Allow" and statement.get("Principal") in ("*", {"AWS": "*"}):
                yield "the bucket's policy allows everybody"


def tags(type_token: str, props: Mapping[str, Any]) -> Iterator[str]:
    """Every resource says whose it is."""
    if type_token in TAGGED:
        missing = [key for key in REQUIRED_TAGS if not (props.get("tags") or {}).get(key)]
        if missing:
            yield f"tags are missing: {', '.join(missing)}"


def rights(type_token: str, props: Mapping[str, Any]) -> Iterator[str]:
    """Roles have named rights: no wildcard action, and acting on everything only under a condition."""
    if type_token != "aws:iam/rolePolicy:RolePolicy":
        return
    for statement in statements(props.get("policy")):
        actions = listed(statement.get("Action"))
        if any(action == "*" or action.endswith(":*") for action in actions):
            yield f"wildcard action {', '.join(actions)}"
        acting = [action for action in actions if not action.split(":")[-1].startswith(("Describe", "List", "Get"))]
        if "*" in listed(statement.get("Resource")) and acting and not statement.get("Condition"):
            yield f"{', '.join(acting)} on every resource"


def statements(document: Any) -> list[dict[str, Any]]:
    """The statements of an IAM policy document; none while it is not known yet."""
    if not isinstance(document, str) or not document.startswith("{"):
        return []
    found: list[dict[str, Any]] = json.loads(document)["Statement"]
    return found


def listed(value: Any) -> list[str]:
    """One or many as a list."""
    return [value] if isinstance(value, str) else list(value or [])


def _policy(name: str, check: Check) -> ResourceValidationPolicy:
    def validate(arguments: ResourceValidationArgs, report: Report) -> None:
        for message in check(arguments.resource_type, arguments.props):
            report(f"{arguments.name}: {message}")

    return ResourceValidationPolicy(name=name, description=(check.__doc__ or name).strip(), validate=validate)


def _protect(arguments: ResourceValidationArgs, report: Report) -> None:
    if arguments.resource_type not in HOLDS_DATA:
        return
    disposable = (arguments.props.get("tags") or {}).get("loopworks:data") == "disposable"
    if not disposable and not arguments.opts.protect:
        report(f"{arguments.name}: holds data and is not protected (or tag it loopworks:data = disposable)")


RESOURCE_POLICIES = [
    _policy("no-open-ports", open_ports),
    _policy("no-public-addresses", public_addresses),
    _policy("encryption-everywhere", encryption),
    _policy("imdsv2-required", metadata_service),
    _policy("no-public-buckets", public_buckets),
    _policy("tags-required", tags),
    _policy("least-rights", rights),
    ResourceValidationPolicy(
        name="data-protected", description="What holds the only copy of data is protected.", validate=_protect
    ),
]
