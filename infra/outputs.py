"""The stack outputs after the contract inventory/stack-outputs.schema.json, version 1.

The dynamic inventory reads these and nothing else; a change of shape is a new version of the contract.
"""

from __future__ import annotations

from typing import Any

import pulumi

from infra.catalogue import InstanceType, instance_type
from infra.catalogue.interfaces import efa_count
from infra.components import Access, Compute, Elastic, Network, Storage
from infra.components.network import policy_document
from infra.components.template import layout_of
from infra.config import ClusterConfig

VERSION = 1
NFS_EXPORT = "/srv/shared"
REDIS_PORT = 6379


def node_facts(config: ClusterConfig, item: InstanceType) -> dict[str, Any]:
    """What the catalogue knows of a node: GPUs, EFA, memory in MiB, local disks in GB, rates in Gbit/s."""
    count = efa_count(layout_of(config, item))
    return {
        "instance_type": item.name,
        "vcpus": item.vcpus,
        "memory_mib": item.memory_mib,
        "gpu_name": item.gpu_name,
        "gpu_count": item.gpu_count,
        "gpu_memory_mib": item.gpu_memory_mib,
        "efa_count": count,
        "efa_gbps": item.efa_gbps if count else 0,
        "efa_rdma_read": item.rdma_read and count > 0,
        "efa_rdma_write": item.rdma_write and count > 0,
        "nvme_count": item.nvme_count,
        "nvme_gb": item.nvme_gb,
    }


def cluster_facts(config: ClusterConfig, network: Network) -> dict[str, Any]:
    """Name, place and network of the cluster."""
    return {
        "name": config.name,
        "provider": "aws",
        "region": config.region,
        "availability_zone": network.zone,
        "vpc_id": network.vpc_id,
        "vpc_cidr": config.vpc_cidr,
    }


def head_facts(config: ClusterConfig, compute: Compute) -> dict[str, Any]:
    """The head node; its public address is empty where it has none."""
    return {
        "name": f"{config.name}-head",
        "instance_id": compute.head.id,
        "instance_type": config.head_instance_type,
        "private_ip": compute.head.private_ip,
        "public_ip": compute.head_address.public_ip if compute.head_address else "",
    }


def access_facts(config: ClusterConfig, access: Access, compute: Compute) -> dict[str, Any]:
    """How Ansible gets in: through the head's public address, or through Session Manager."""
    return {
        "mode": "bastion" if config.head_public_ip else "ssm",
        "user": config.ssh_user,
        "key_name": access.key_name or "",
        "bastion_host": compute.head_address.public_ip if compute.head_address else "",
        "allowed_cidrs": config.allowed_cidrs,
    }


def storage_facts(storage: Storage, compute: Compute) -> dict[str, Any]:
    """Mount facts of the shared storage; the head serves it for kind nfs."""
    if storage.shared["kind"] != "nfs":
        return storage.shared
    return {**storage.shared, "source": pulumi.Output.concat(compute.head.private_ip, ":", NFS_EXPORT)}


def export_outputs(
    config: ClusterConfig,
    network: Network,
    access: Access,
    storage: Storage,
    compute: Compute,
    elastic: Elastic | None,
    *,
    redis_parameter: pulumi.Output[str] | None,
) -> None:
    """Export everything that the contract names."""
    exports: dict[str, Any] = {
        "contract_version": VERSION,
        "cluster": cluster_facts(config, network),
        "access": access_facts(config, access, compute),
        "head": head_facts(config, compute),
        "gpu_nodes": [
            {"name": f"{config.name}-gpu-{number:04d}", "instance_id": node.id, "private_ip": node.private_ip}
            for number, node in enumerate(compute.nodes, start=1)
        ],
        "gpu_node_facts": node_facts(config, instance_type(config.instance_type)),
        "storage": storage_facts(storage, compute),
        "checkpoints": {
            "bucket": storage.bucket.bucket,
            "url": pulumi.Output.concat("s3://", storage.bucket.bucket, "/checkpoints"),
            "region": config.region,
            "on_destroy": config.data_on_destroy,
        },
        "elastic": elastic_facts(config, elastic),
        "queue": {
            "host": compute.head.private_ip,
            "port": REDIS_PORT,
            "password_parameter": redis_parameter if redis_parameter is not None else "",
        },
    }
    if config.redis_password:
        exports["redis_password"] = pulumi.Output.secret(config.redis_password)
    for key, value in exports.items():
        pulumi.export(key, value)


def elastic_facts(config: ClusterConfig, elastic: Elastic | None) -> dict[str, Any]:
    """The Auto Scaling group, or an empty name and a limit of 0 where there is none."""
    if elastic is None:
        return {"group": "", "max_nodes": 0}
    facts = node_facts(config, instance_type(config.elastic_type))
    return {"group": elastic.group.name, "max_nodes": config.elastic_max, "node_facts": facts}


def parameter_policy(parameter_arn: str) -> str:
    """The right to read one parameter."""
    return policy_document({"Action": ["ssm:GetParameter"], "Resource": parameter_arn})
