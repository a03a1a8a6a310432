"""VPC with one private GPU subnet and one public subnet in one zone, ways out, endpoints and flow logs.

One zone, because EFA and FSx for Lustre live in one. The S3 gateway endpoint is free and stands on every route
table: without it all checkpoint and data traffic is billed as NAT bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import pulumi
import pulumi_aws as aws

from infra.components.naming import Naming
from infra.config import ClusterConfig

ANYWHERE = "0.0.0.0/0"


class Network(pulumi.ComponentResource):
    """Where everything lives: `vpc_id`, `gpu_subnet_id`, `public_subnet_id`, `zone`."""

    def __init__(self, config: ClusterConfig, zone: str) -> None:
        naming = Naming.of(config)
        super().__init__("loopworks:aws:Network", naming.name("network"))
        self._config, self._naming = config, naming
        self._child = pulumi.ResourceOptions(parent=self)
        self.vpc = aws.ec2.Vpc(
            naming.name("vpc"),
            cidr_block=config.vpc_cidr,
            enable_dns_hostnames=True,
            enable_dns_support=True,
            tags=naming.tags("vpc"),
            opts=self._child,
        )
        # The group that AWS gives each VPC lets its members talk to each other; with no rules it does nothing.
        aws.ec2.DefaultSecurityGroup(
            naming.name("default-group"), vpc_id=self.vpc.id, tags=naming.tags("default-unused"), opts=self._child
        )
        self._public_subnet = self._subnet("public", config.public_subnet_cidr, zone)
        self._gpu_subnet = self._subnet("gpu", config.gpu_subnet_cidr, zone)
        public_table, gpu_table = self._routes()
        self._s3_endpoint([public_table, gpu_table])
        self._interface_endpoints()
        if config.flow_logs:
            self._flow_logs()
        self.vpc_id = self.vpc.id
        self.gpu_subnet_id = self._gpu_subnet.id
        self.public_subnet_id = self._public_subnet.id
        self.zone = self._gpu_subnet.availability_zone
        self.register_outputs({"vpc_id": self.vpc_id, "gpu_subnet_id": self.gpu_subnet_id, "zone": self.zone})

    def _subnet(self, part: str, cidr: str, zone: str) -> aws.ec2.Subnet:
        # A zone found by offering is looked up once: a new offering must not move the subnet.
        keep = [] if self._config.availability_zone else ["availability_zone"]
        return aws.ec2.Subnet(
            self._naming.name(f"{part}-subnet"),
            vpc_id=self.vpc.id,
            cidr_block=cidr,
            availability_zone=zone,
            map_public_ip_on_launch=False,
            tags=self._naming.tags(f"{part}-subnet"),
            opts=pulumi.ResourceOptions.merge(self._child, pulumi.ResourceOptions(ignore_changes=keep)),
        )

    def _routes(self) -> tuple[aws.ec2.RouteTable, aws.ec2.RouteTable]:
        naming, config = self._naming, self._config
        gateway = aws.ec2.InternetGateway(
            naming.name("internet"), vpc_id=self.vpc.id, tags=naming.tags("internet"), opts=self._child
        )
        public = self._route_table("public", self._public_subnet)
        gpu = self._route_table("gpu", self._gpu_subnet)
        self._default_route("public", public, gateway_id=gateway.id)
        if config.gpu_public_ip:
            self._default_route("gpu", gpu, gateway_id=gateway.id)
        elif config.nat_gateway:
            address = aws.ec2.Eip(naming.name("nat-ip"), domain="vpc", tags=naming.tags("nat"), opts=self._child)
            self.nat = aws.ec2.NatGateway(
                naming.name("nat"),
                allocation_id=address.allocation_id,
                subnet_id=self._public_subnet.id,
                tags=naming.tags("nat"),
                opts=pulumi.ResourceOptions.merge(self._child, pulumi.ResourceOptions(depends_on=[gateway])),
            )
            self._default_route("gpu", gpu, nat_gateway_id=self.nat.id)
        return public, gpu

    def _route_table(self, part: str, subnet: aws.ec2.Subnet) -> aws.ec2.RouteTable:
        naming = self._naming
        table = aws.ec2.RouteTable(
            naming.name(f"{part}-routes"), vpc_id=self.vpc.id, tags=naming.tags(f"{part}-routes"), opts=self._child
        )
        aws.ec2.RouteTableAssociation(
            naming.name(f"{part}-routes"), subnet_id=subnet.id, route_table_id=table.id, opts=self._child
        )
        return table

    def _default_route(self, part: str, table: aws.ec2.RouteTable, **target: pulumi.Input[str]) -> None:
        aws.ec2.Route(
            self._naming.name(f"{part}-default"),
            route_table_id=table.id,
            destination_cidr_block=ANYWHERE,
            opts=self._child,
            **target,
        )

    def _s3_endpoint(self, tables: list[aws.ec2.RouteTable]) -> None:
        aws.ec2.VpcEndpoint(
            self._naming.name("s3"),
            vpc_id=self.vpc.id,
            service_name=f"com.amazonaws.{self._config.region}.s3",
            vpc_endpoint_type="Gateway",
            route_table_ids=[table.id for table in tables],
            tags=self._naming.tags("s3"),
            opts=self._child,
        )

    def _interface_endpoints(self) -> None:
        naming, config = self._naming, self._config
        if not config.interface_endpoints:
            return
        group = aws.ec2.SecurityGroup(
            naming.name("endpoints"),
            vpc_id=self.vpc.id,
            description="HTTPS from the VPC to interface endpoints",
            tags=naming.tags("endpoints"),
            opts=self._child,
        )
        aws.vpc.SecurityGroupIngressRule(
            naming.name("endpoints-https"),
            security_group_id=group.id,
            description="HTTPS from the VPC",
            ip_protocol="tcp",
            from_port=443,
            to_port=443,
            cidr_ipv4=config.vpc_cidr,
            tags=naming.tags("endpoints-https"),
            opts=self._child,
        )
        for service in config.interface_endpoints:
            part = f"endpoint-{service.replace('.', '-')}"
            aws.ec2.VpcEndpoint(
                naming.name(part),
                vpc_id=self.vpc.id,
                service_name=f"com.amazonaws.{config.region}.{service}",
                vpc_endpoint_type="Interface",
                private_dns_enabled=True,
                subnet_ids=[self._gpu_subnet.id],
                security_group_ids=[group.id],
                tags=naming.tags(part),
                opts=self._child,
            )

    def _flow_logs(self) -> None:
        naming = self._naming
        group = aws.cloudwatch.LogGroup(
            naming.name("flow-logs"),
            retention_in_days=self._config.log_retention_days,
            tags=naming.tags("flow-logs"),
            opts=self._child,
        )
        role = aws.iam.Role(
            naming.name("flow-logs"),
            assume_role_policy=assume_role("vpc-flow-logs.amazonaws.com"),
            tags=naming.tags("flow-logs"),
            opts=self._child,
        )
        actions = ["logs:CreateLogStream", "logs:PutLogEvents", "logs:DescribeLogGroups", "logs:DescribeLogStreams"]
        policy = group.arn.apply(lambda arn: policy_document({"Action": actions, "Resource": [arn, f"{arn}:*"]}))
        aws.iam.RolePolicy(naming.name("flow-logs"), role=role.id, policy=policy, opts=self._child)
        aws.ec2.FlowLog(
            naming.name("flow-logs"),
            vpc_id=self.vpc.id,
            traffic_type="ALL",
            log_destination_type="cloud-watch-logs",
            log_destination=group.arn,
            iam_role_arn=role.arn,
            tags=naming.tags("flow-logs"),
            opts=self._child,
        )


def assume_role(service: str) -> str:
    """Trust policy: the service may take the role."""
    statement = {"Effect": "Allow", "Principal": {"Service": service}, "Action": "sts:AssumeRole"}
    return json.dumps({"Version": "2012-10-17", "Statement": [statement]})


def policy_document(*statements: Mapping[str, object]) -> str:
    """An IAM policy of allowing statements, unless a statement says Deny."""
    return json.dumps({"Version": "2012-10-17", "Statement": [{"Effect": "Allow", **entry} for entry in statements]})
