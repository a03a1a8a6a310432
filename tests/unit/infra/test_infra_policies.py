"""Each policy finds what it is for, and finds nothing in the plans that the program makes."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("pulumi_policy")

from pulumi_policy import PolicyCustomTimeouts, PolicyResource, PolicyResourceOptions

from infra.policies.resource_rules import RESOURCE_POLICIES, TAGGED
from infra.policies.stack_rules import STACK_POLICIES
from tests.infra_engine.policy import policy_resources, violations
from tests.infra_engine.stacks import preview

TAGS = {"loopworks:cluster": "c", "Owner": "o", "ManagedBy": "pulumi"}


def resource(type_token, props, *, name="thing", protect=False):
    options = PolicyResourceOptions(protect, [], None, [], PolicyCustomTimeouts(0, 0, 0), [])
    return PolicyResource(type_token, props, f"urn:{type_token}::{name}", name, options, None, None, [], {})


def policy_of(action, effect="Allow", **more):
    return json.dumps({"Version": "2012-10-17", "Statement": [{"Effect": effect, "Action": action, **more}]})


INGRESS = "aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule"
TEMPLATE = "aws:ec2/launchTemplate:LaunchTemplate"
INSTANCE = "aws:ec2/instance:Instance"
ROLE_POLICY = "aws:iam/rolePolicy:RolePolicy"
GOOD_IMDS = {"httpTokens": "required", "httpPutResponseHopLimit": 2}
WRONG = [
    ("no-open-ports", INGRESS, {"cidrIpv4": "0.0.0.0/0", "fromPort": 22, "toPort": 22}),
    ("no-open-ports", INGRESS, {"cidrIpv6": "::/0", "fromPort": 6379, "toPort": 6379}),
    ("no-open-ports", "aws:ec2/securityGroup:SecurityGroup", {"ingress": [{}], "tags": TAGS}),
    ("no-open-ports", "aws:ec2/defaultSecurityGroup:DefaultSecurityGroup", {"ingress": [{}]}),
    ("no-public-addresses", "aws:ec2/subnet:Subnet", {"mapPublicIpOnLaunch": True, "tags": TAGS}),
    ("no-public-addresses", TEMPLATE,
     {"networkInterfaces": [{"associatePublicIpAddress": "true"}, {}], "metadataOptions": GOOD_IMDS, "tags": TAGS}),
    ("encryption-everywhere", TEMPLATE,
     {"blockDeviceMappings": [{"deviceName": "/dev/sda1", "ebs": {}}], "metadataOptions": GOOD_IMDS, "tags": TAGS}),
    ("encryption-everywhere", INSTANCE, {"rootBlockDevice": {"encrypted": False}, "metadataOptions": GOOD_IMDS}),
    ("encryption-everywhere", "aws:ebs/volume:Volume", {"encrypted": False}),
    ("encryption-everywhere", "aws:efs/fileSystem:FileSystem", {}),
    ("encryption-everywhere", "aws:sns/topic:Topic", {}),
    ("encryption-everywhere", "aws:kms/key:Key", {}),
    ("encryption-everywhere", "aws:ssm/parameter:Parameter", {"type": "String"}),
    ("imdsv2-required", INSTANCE, {"metadataOptions": {"httpTokens": "optional"}}),
    ("imdsv2-required", TEMPLATE, {}),
    ("imdsv2-required", TEMPLATE, {"metadataOptions": {"httpTokens": "required", "httpPutResponseHopLimit": 4}}),
    ("no-public-buckets", "aws:s3/bucketPublicAccessBlock:BucketPublicAccessBlock", {"blockPublicAcls": True}),
    ("no-public-buckets", "aws:s3/bucket:Bucket", {"acl": "public-read"}),
    ("no-public-buckets", "aws:s3/bucketPolicy:BucketPolicy", {"policy": policy_of("s3:GetObject", Principal="*")}),
    ("tags-required", "aws:ec2/vpc:Vpc", {"tags": {"Owner": "o"}}),
    ("least-rights", ROLE_POLICY, {"policy": policy_of("s3:*", Resource="arn:aws:s3:::b")}),
    ("least-rights", ROLE_POLICY, {"policy": policy_of(["ec2:TerminateInstances"], Resource="*")}),
    ("data-protected", "aws:s3/bucket:Bucket", {"tags": TAGS}),
    ("data-protected", "aws:ebs/volume:Volume", {"tags": TAGS, "encrypted": True}),
]  # fmt: skip


@pytest.mark.parametrize(("policy", "type_token", "props"), WRONG, ids=[f"{i}-{row[0]}" for i, row in enumerate(WRONG)])
def test_each_policy_finds_its_fault(policy, type_token, props):
    assert any(text.startswith(f"{policy}: ") for text in violations([resource(type_token, props)]))


def test_disposable_or_protected_data_is_fine():
    bucket = "aws:s3/bucket:Bucket"
    for candidate in (
        resource(bucket, {"tags": {**TAGS, "loopworks:data": "disposable"}}),
        resource(bucket, {"tags": TAGS}, protect=True),
    ):
        assert not [text for text in violations([candidate]) if text.startswith("data-protected")]


def drop(resources, type_token, name=""):
    return [item for item in resources if not (item.resource_type == type_token and name in item.name)]


@pytest.fixture(scope="module")
def planned():
    result = preview({"elasticMax": 1})
    assert result.error == ""
    return policy_resources(result)


def test_nothing_is_found_in_the_plan(planned):
    assert violations(planned) == []


MISSING = [
    ("buckets-guarded", "aws:s3/bucketPolicy:BucketPolicy", ""),
    ("buckets-guarded", "aws:s3/bucketVersioning:BucketVersioning", ""),
    ("vpcs-logged", "aws:ec2/flowLog:FlowLog", ""),
    ("s3-stays-inside", "aws:ec2/vpcEndpoint:VpcEndpoint", "s3"),
    ("efa-talks-to-itself", "aws:vpc/securityGroupEgressRule:SecurityGroupEgressRule", "efa-self"),
]


@pytest.mark.parametrize(("policy", "type_token", "name"), MISSING)
def test_taking_a_guard_away_is_found(planned, policy, type_token, name):
    found = violations(drop(planned, type_token, name))
    assert any(text.startswith(f"{policy}: ") for text in found), found


def test_every_tagged_type_of_the_plan_is_known(planned):
    with_tags = {item.resource_type for item in planned if isinstance(item.props.get("tags"), dict)}
    rules = {INGRESS, "aws:vpc/securityGroupEgressRule:SecurityGroupEgressRule",
             "aws:ec2/defaultSecurityGroup:DefaultSecurityGroup"}  # fmt: skip
    assert with_tags - rules <= set(TAGGED)


def test_policies_have_names_and_descriptions():
    names = [policy.name for policy in [*RESOURCE_POLICIES, *STACK_POLICIES]]
    assert len(set(names)) == len(names) == 12
    assert all(policy.description for policy in [*RESOURCE_POLICIES, *STACK_POLICIES])
