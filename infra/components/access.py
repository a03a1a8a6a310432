"""Security groups, roles with least rights, key pair.

Groups: `cluster` (everything inside the cluster, everything out), `efa` (all protocols to and from itself, both ways:
a rule to 0.0.0.0/0 does not cover EFA), `head` (22, 8888 from named networks, 6379 from named networks), `storage`.
Rules are resources of their own; inline rules and standalone rules delete each other.
"""

from __future__ import annotations

import pulumi
import pulumi_aws as aws

from infra.components.naming import Naming
from infra.components.network import ANYWHERE, Network, assume_role, policy_document
from infra.config import ClusterConfig

SSH, GRAFANA, REDIS = 22, 8888, 6379
LUSTRE_PORTS = ((988, 988), (1018, 1023))
NFS_PORT = 2049
ALL = "-1"
SSM_POLICY = "arn:aws:iam::aws:policy/AmazonSSMManagedInstanceCore"


class Access(pulumi.ComponentResource):
    """Who may talk to whom and with which rights."""

    def __init__(self, config: ClusterConfig, network: Network) -> None:
        self._naming = Naming.of(config)
        super().__init__("loopworks:aws:Access", self._naming.name("access"))
        self._config, self._vpc_id = config, network.vpc_id
        self._child = pulumi.ResourceOptions(parent=self)
        self.cluster_group = self._group("cluster", "Everything inside the cluster; everything out")
        self.efa_group = self._group("efa", "EFA traffic: all protocols to and from this group")
        self.head_group = self._group("head", "Named networks to the head node")
        self._inside("cluster", self.cluster_group)
        self._inside("efa", self.efa_group)
        self._rule("cluster-out", self.cluster_group, egress=True, protocol=ALL, cidr=ANYWHERE)
        self._head_rules()
        self.storage_group = self._storage_group()
        self.node_role = self._role("gpu")
        self.head_role = self._role("head")
        self.node_profile = self._profile("gpu", self.node_role)
        self.head_profile = self._profile("head", self.head_role)
        self.key_name = self._key()
        self.register_outputs({"cluster_group": self.cluster_group.id, "efa_group": self.efa_group.id})

    def _group(self, part: str, description: str) -> aws.ec2.SecurityGroup:
        return aws.ec2.SecurityGroup(
            self._naming.name(part),
            vpc_id=self._vpc_id,
            description=description,
            tags=self._naming.tags(part),
            opts=self._child,
        )

    def _rule(
        self,
        part: str,
        group: aws.ec2.SecurityGroup,
        *,
        egress: bool = False,
        protocol: str = "tcp",
        ports: tuple[int, int] | None = None,
        cidr: str | None = None,
        peer: aws.ec2.SecurityGroup | None = None,
    ) -> None:
        kind = aws.vpc.SecurityGroupEgressRule if egress else aws.vpc.SecurityGroupIngressRule
        kind(
            self._naming.name(part),
            security_group_id=group.id,
            description=part.replace("-", " "),
            ip_protocol=protocol,
            from_port=ports[0] if ports else None,
            to_port=ports[1] if ports else None,
            cidr_ipv4=cidr,
            referenced_security_group_id=peer.id if peer else None,
            tags=self._naming.tags(part),
            opts=self._child,
        )

    def _inside(self, part: str, group: aws.ec2.SecurityGroup) -> None:
        self._rule(f"{part}-self-in", group, protocol=ALL, peer=group)
        self._rule(f"{part}-self-out", group, egress=True, protocol=ALL, peer=group)

    def _head_rules(self) -> None:
        config = self._config
        for index, cidr in enumerate(config.allowed_cidrs):
            self._rule(f"head-ssh-{index}", self.head_group, ports=(SSH, SSH), cidr=cidr)
            self._rule(f"head-grafana-{index}", self.head_group, ports=(GRAFANA, GRAFANA), cidr=cidr)
        for index, cidr in enumerate(config.redis_cidrs):
            self._rule(f"head-redis-{index}", self.head_group, ports=(REDIS, REDIS), cidr=cidr)

    def _storage_group(self) -> aws.ec2.SecurityGroup | None:
        kind = self._config.shared_storage
        if kind not in ("fsx-lustre", "efs"):
            return None
        group = self._group("storage", "File system traffic")
        ports = LUSTRE_PORTS if kind == "fsx-lustre" else ((NFS_PORT, NFS_PORT),)
        for first, last in ports:
            span = (first, last)
            self._rule(f"storage-{first}-from-cluster", group, ports=span, peer=self.cluster_group)
            if kind == "fsx-lustre":
                # Lustre servers also talk among themselves and call clients back.
                self._rule(f"storage-{first}-self-in", group, ports=span, peer=group)
                self._rule(f"storage-{first}-self-out", group, egress=True, ports=span, peer=group)
                self._rule(f"storage-{first}-to-cluster", group, egress=True, ports=span, peer=self.cluster_group)
                self._rule(f"cluster-{first}-from-storage", self.cluster_group, ports=span, peer=group)
        return group

    def _role(self, part: str) -> aws.iam.Role:
        role = aws.iam.Role(
            self._naming.name(part),
            assume_role_policy=assume_role("ec2.amazonaws.com"),
            tags=self._naming.tags(part),
            opts=self._child,
        )
        if self._config.ssm:
            name = self._naming.name(f"{part}-ssm")
            aws.iam.RolePolicyAttachment(name, role=role.name, policy_arn=SSM_POLICY, opts=self._child)
        return role

    def _profile(self, part: str, role: aws.iam.Role) -> aws.iam.InstanceProfile:
        name = self._naming.name(part)
        return aws.iam.InstanceProfile(name, role=role.name, tags=self._naming.tags(part), opts=self._child)

    def _key(self) -> pulumi.Output[str] | None:
        if self._config.key_name:
            return pulumi.Output.from_input(self._config.key_name)
        if not self._config.ssh_public_key:
            return None
        pair = aws.ec2.KeyPair(
            self._naming.name("key"),
            public_key=self._config.ssh_public_key.strip(),
            tags=self._naming.tags("key"),
            opts=self._child,
        )
        name: pulumi.Output[str] = pair.key_name
        return name

    def allow_bucket(self, bucket_arn: pulumi.Output[str], kms_key_arn: str) -> None:
        """Head and nodes may read and write this bucket, and use its key where it has one of its own."""
        policy = bucket_arn.apply(lambda arn: bucket_policy(arn, kms_key_arn))
        for part, role in (("gpu", self.node_role), ("head", self.head_role)):
            aws.iam.RolePolicy(self._naming.name(f"{part}-bucket"), role=role.id, policy=policy, opts=self._child)

    def allow_head(self, part: str, policy: pulumi.Input[str]) -> None:
        """One more policy for the head's role."""
        aws.iam.RolePolicy(self._naming.name(f"head-{part}"), role=self.head_role.id, policy=policy, opts=self._child)


def bucket_policy(bucket_arn: str, kms_key_arn: str) -> str:
    """Rights on one bucket: list it, read, write and delete objects, end broken uploads."""
    listing = {"Action": ["s3:ListBucket", "s3:GetBucketLocation"], "Resource": bucket_arn}
    objects = {
        "Action": ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"],
        "Resource": f"{bucket_arn}/*",
    }
    key = {"Action": ["kms:Decrypt", "kms:GenerateDataKey"], "Resource": kms_key_arn}
    return policy_document(listing, objects, *([key] if kms_key_arn else []))
