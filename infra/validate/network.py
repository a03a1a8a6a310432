"""Address ranges, subnets and endpoints."""

from __future__ import annotations

import ipaddress

from infra.catalogue import efa_layout, instance_types
from infra.catalogue.interfaces import private_addresses
from infra.config import ClusterConfig
from infra.findings import Finding, error, warning

AWS_RESERVED = 5  # the first four addresses and the last one of each subnet
HEADROOM = 8  # network interfaces of file systems, Lambda, later endpoints
DOCKER_DEFAULT = ipaddress.ip_network("172.17.0.0/16")
SSM_ENDPOINTS = ("ssm", "ssmmessages", "ec2messages")
KNOWN_ENDPOINTS = (*SSM_ENDPOINTS, "ec2", "logs", "monitoring", "sts", "kms", "ecr.api", "ecr.dkr", "sqs", "fsx")
RETENTIONS = (1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731, 1096, 1827, 2192, 2557, 2922, 3288, 3653)
Network = ipaddress.IPv4Network


def _parse(key: str, text: str, findings: list[Finding]) -> Network | None:
    try:
        return ipaddress.IPv4Network(text)
    except ValueError as fault:
        findings.append(error(key, f"{text!r} is not an IPv4 network ({fault})", "write it like 10.40.0.0/20"))
        return None


def _sizes(key: str, network: Network) -> list[Finding]:
    if 16 <= network.prefixlen <= 28:
        return []
    return [error(key, f"{network} is /{network.prefixlen}; AWS takes /16 to /28", "choose a prefix from /16 to /28")]


def addresses_needed(config: ClusterConfig) -> int:
    """Private addresses that the GPU subnet must hold: nodes, endpoints, file system, headroom."""
    counts = ((config.node_count, config.instance_type), (config.elastic_max, config.elastic_type))
    total = HEADROOM + len(config.interface_endpoints)
    for count, name in counts:
        item = instance_types().get(name)
        layout = efa_layout(item, efa=config.efa != "never", single=config.gpu_public_ip) if item else ()
        total += count * max(1, private_addresses(layout))
    if config.shared_storage == "fsx-lustre":
        total += 2 + config.fsx_capacity_gib // 2400
    return total


def check(config: ClusterConfig) -> list[Finding]:
    """Findings about the network of the configuration."""
    findings: list[Finding] = []
    vpc = _parse("vpcCidr", config.vpc_cidr, findings)
    gpu = _parse("gpuSubnetCidr", config.gpu_subnet_cidr, findings)
    public = _parse("publicSubnetCidr", config.public_subnet_cidr, findings)
    if vpc:
        findings += _sizes("vpcCidr", vpc) + _vpc_range(vpc)
    for key, subnet in (("gpuSubnetCidr", gpu), ("publicSubnetCidr", public)):
        if subnet:
            findings += _sizes(key, subnet)
        if subnet and vpc and not subnet.subnet_of(vpc):
            findings.append(error(key, f"{subnet} is outside the VPC {vpc}", "choose a part of vpcCidr"))
    if gpu and public and gpu.overlaps(public):
        findings.append(error("publicSubnetCidr", f"{public} overlaps the GPU subnet {gpu}", "separate the two"))
    if gpu:
        findings += _subnet_room(config, gpu)
    return findings + _zone(config) + _ways_out(config)


def _vpc_range(vpc: Network) -> list[Finding]:
    findings: list[Finding] = []
    if not vpc.is_private:
        findings.append(
            error("vpcCidr", f"{vpc} is public address space", "use a part of 10/8, 172.16/12 or 192.168/16")
        )
    if vpc.overlaps(DOCKER_DEFAULT):
        findings.append(
            warning("vpcCidr", f"{vpc} overlaps Docker's default {DOCKER_DEFAULT}", "choose another range for the VPC")
        )
    return findings


def _subnet_room(config: ClusterConfig, gpu: Network) -> list[Finding]:
    room, need = gpu.num_addresses - AWS_RESERVED, addresses_needed(config)
    if need <= room:
        return []
    prefix = 32 - (need + AWS_RESERVED - 1).bit_length()
    return [error("gpuSubnetCidr", f"{gpu} has {room} addresses, the cluster needs {need}", f"use /{prefix} or larger")]


def _zone(config: ClusterConfig) -> list[Finding]:
    zone = config.availability_zone
    if zone and not (zone.startswith(config.region) and len(zone) > len(config.region)):
        return [error("availabilityZone", f"{zone} is not in {config.region}", f"use a zone such as {config.region}a")]
    return []


def _ways_out(config: ClusterConfig) -> list[Finding]:
    findings: list[Finding] = []
    unknown = [name for name in config.interface_endpoints if name not in KNOWN_ENDPOINTS]
    if unknown:
        findings.append(
            error("interfaceEndpoints", f"unknown: {', '.join(unknown)}", f"known: {', '.join(KNOWN_ENDPOINTS)}")
        )
    if len(set(config.interface_endpoints)) < len(config.interface_endpoints):
        findings.append(error("interfaceEndpoints", "an endpoint is named twice", "name each endpoint once"))
    missing = [name for name in SSM_ENDPOINTS if name not in config.interface_endpoints]
    if not config.nat_gateway and config.ssm and missing:
        findings.append(
            error(
                "interfaceEndpoints",
                f"without NAT gateway Session Manager needs {', '.join(missing)}",
                "add them, or set natGateway or clear ssm",
            )
        )
    if not config.nat_gateway and not config.gpu_public_ip:
        findings.append(
            warning("natGateway", "GPU nodes reach no package index", "use an image and a wheelhouse with all packages")
        )
    if config.log_retention_days not in RETENTIONS:
        findings.append(
            error(
                "logRetentionDays",
                f"CloudWatch does not know {config.log_retention_days} days",
                f"use one of {', '.join(map(str, RETENTIONS[:10]))} ...",
            )
        )
    return findings
