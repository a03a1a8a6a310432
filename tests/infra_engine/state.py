"""The engine's memory of a stack and how it decides between create, same, update, replace and delete.

The real engine asks the provider's schema which changes force a replacement. FORCE_NEW stands in for it: for the types
of this project, the properties that AWS cannot change in place. It is on the strict side (a launch template version
on an instance counts as forcing), so a plan without replacement here is a plan that changes no such input at all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

FORCE_NEW: dict[str, frozenset[str]] = {
    "aws:ec2/vpc:Vpc": frozenset({"cidrBlock"}),
    "aws:ec2/subnet:Subnet": frozenset({"vpcId", "cidrBlock", "availabilityZone"}),
    "aws:ec2/instance:Instance": frozenset({"ami", "subnetId", "keyName", "launchTemplate"}),
    "aws:ec2/launchTemplate:LaunchTemplate": frozenset({"name"}),
    "aws:ec2/placementGroup:PlacementGroup": frozenset({"name", "strategy"}),
    "aws:ec2/capacityReservation:CapacityReservation": frozenset(
        {"availabilityZone", "instanceType", "instancePlatform", "placementGroupArn"}
    ),
    "aws:ec2/keyPair:KeyPair": frozenset({"publicKey", "keyName"}),
    "aws:ec2/securityGroup:SecurityGroup": frozenset({"vpcId", "description", "name"}),
    "aws:ec2/natGateway:NatGateway": frozenset({"subnetId", "allocationId"}),
    "aws:ec2/vpcEndpoint:VpcEndpoint": frozenset({"vpcId", "serviceName", "vpcEndpointType"}),
    "aws:s3/bucket:Bucket": frozenset({"bucket"}),
    "aws:ebs/volume:Volume": frozenset({"availabilityZone", "encrypted", "kmsKeyId"}),
    "aws:efs/fileSystem:FileSystem": frozenset({"encrypted", "kmsKeyId"}),
    "aws:fsx/lustreFileSystem:LustreFileSystem": frozenset(
        {"subnetIds", "deploymentType", "securityGroupIds", "efaEnabled", "kmsKeyId", "fileSystemTypeVersion"}
    ),
    "aws:autoscaling/group:Group": frozenset({"name"}),
    "aws:ssm/parameter:Parameter": frozenset({"name"}),
}


@dataclass
class Record:
    """One resource of the stack: what the program asked for (`inputs`), what exists (`outputs`, `id`), its options."""

    urn: str
    type: str
    name: str
    custom: bool
    inputs: dict[str, Any]
    outputs: dict[str, Any]
    id: str
    parent: str
    protect: bool
    retain: bool
    ignore_changes: tuple[str, ...]
    dependencies: tuple[str, ...]


@dataclass(frozen=True)
class Step:
    """One line of a plan: what happens to which resource, and which properties changed."""

    op: str
    urn: str
    type: str
    name: str
    changed: tuple[str, ...] = ()


@dataclass
class StackState:
    """Everything the engine remembers between runs; records stand in the order of creation."""

    records: dict[str, Record] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)


def with_ignored(inputs: dict[str, Any], old: Record | None, ignored: tuple[str, ...]) -> dict[str, Any]:
    """The inputs, with ignored properties put back to what they were."""
    if old is None:
        return inputs
    kept = dict(inputs)
    for key in ignored:
        if key in old.inputs:
            kept[key] = old.inputs[key]
        else:
            kept.pop(key, None)
    return kept


def decide(type_token: str, inputs: dict[str, Any], old: Record | None) -> tuple[str, tuple[str, ...]]:
    """create, same, update or replace, and the changed top-level properties."""
    if old is None:
        return "create", ()
    keys = sorted(set(inputs) | set(old.inputs))
    changed = tuple(key for key in keys if inputs.get(key) != old.inputs.get(key))
    if not changed:
        return "same", ()
    return ("replace" if FORCE_NEW.get(type_token, frozenset()) & set(changed) else "update"), changed
