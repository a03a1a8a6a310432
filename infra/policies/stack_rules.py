"""Policies about resources together. They follow dependencies, not ids, so that they also hold in a preview."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pulumi_policy import PolicyResource, StackValidationArgs, StackValidationPolicy

from infra.policies.resource_rules import BUCKET, GROUP, INGRESS, TEMPLATE, statements

Report = Callable[..., None]
Check = Callable[[list[PolicyResource]], Iterator[str]]
EGRESS = "aws:vpc/securityGroupEgressRule:SecurityGroupEgressRule"
ENDPOINT = "aws:ec2/vpcEndpoint:VpcEndpoint"
TABLE = "aws:ec2/routeTable:RouteTable"
GUARDS = (
    "aws:s3/bucketPublicAccessBlock:BucketPublicAccessBlock",
    "aws:s3/bucketServerSideEncryptionConfiguration:BucketServerSideEncryptionConfiguration",
    "aws:s3/bucketVersioning:BucketVersioning",
    "aws:s3/bucketPolicy:BucketPolicy",
    "aws:s3/bucketOwnershipControls:BucketOwnershipControls",
    "aws:s3/bucketLifecycleConfiguration:BucketLifecycleConfiguration",
)
EFA_KINDS = ("efa", "efa-only")


def of_type(resources: list[PolicyResource], type_token: str) -> list[PolicyResource]:
    """The resources of one type."""
    return [resource for resource in resources if resource.resource_type == type_token]


def linked(resource: PolicyResource, key: str) -> set[str]:
    """URNs of the resources that a property was made from."""
    return {target.urn for target in resource.property_dependencies.get(key, [])}


def buckets_guarded(resources: list[PolicyResource]) -> Iterator[str]:
    """Each bucket is encrypted, versioned, not public, TLS only, owned, and cleaned up."""
    for bucket in of_type(resources, BUCKET):
        for guard in GUARDS:
            if not any(bucket.urn in linked(resource, "bucket") for resource in of_type(resources, guard)):
                yield f"{bucket.name} has no {guard.rpartition(':')[2]}"
    for policy in of_type(resources, GUARDS[3]):
        document = policy.props.get("policy")
        known = statements(document)
        if known and not any("aws:SecureTransport" in str(statement.get("Condition")) for statement in known):
            yield f"{policy.name} does not refuse requests without TLS"


def vpcs_logged(resources: list[PolicyResource]) -> Iterator[str]:
    """Each VPC has flow logs."""
    for vpc in of_type(resources, "aws:ec2/vpc:Vpc"):
        logs = of_type(resources, "aws:ec2/flowLog:FlowLog")
        if not any(vpc.urn in linked(log, "vpcId") for log in logs):
            yield f"{vpc.name} has no flow logs (set flowLogs: true)"


def s3_stays_inside(resources: list[PolicyResource]) -> Iterator[str]:
    """The S3 gateway endpoint stands on every route table, so that no S3 byte is billed by the NAT gateway."""
    covered: set[str] = set()
    for endpoint in of_type(resources, ENDPOINT):
        if str(endpoint.props.get("serviceName")).endswith(".s3"):
            covered |= linked(endpoint, "routeTableIds")
    for table in of_type(resources, TABLE):
        if table.urn not in covered:
            yield f"{table.name} has no S3 gateway endpoint"


def efa_talks_to_itself(resources: list[PolicyResource]) -> Iterator[str]:
    """Groups of templates with EFA allow all protocols to and from themselves: 0.0.0.0/0 does not cover EFA."""
    groups = {group.urn for group in of_type(resources, GROUP)}
    talking = _self_ruled(resources, INGRESS) & _self_ruled(resources, EGRESS)
    for template in of_type(resources, TEMPLATE):
        interfaces = template.props.get("networkInterfaces") or []
        used = linked(template, "networkInterfaces") & groups
        if any(entry.get("interfaceType") in EFA_KINDS for entry in interfaces) and not (used and used <= talking):
            yield f"{template.name}: a group of its interfaces lacks self rules both ways"


def _self_ruled(resources: list[PolicyResource], kind: str) -> set[str]:
    found: set[str] = set()
    for rule in of_type(resources, kind):
        if rule.props.get("ipProtocol") == "-1":
            found |= linked(rule, "securityGroupId") & linked(rule, "referencedSecurityGroupId")
    return found


def _policy(name: str, check: Check) -> StackValidationPolicy:
    def validate(arguments: StackValidationArgs, report: Report) -> None:
        for message in check(arguments.resources):
            report(message)

    return StackValidationPolicy(name=name, description=(check.__doc__ or name).strip(), validate=validate)


STACK_POLICIES = [
    _policy("buckets-guarded", buckets_guarded),
    _policy("vpcs-logged", vpcs_logged),
    _policy("s3-stays-inside", s3_stays_inside),
    _policy("efa-talks-to-itself", efa_talks_to_itself),
]
