"""Launch templates of GPU nodes: every interface of the type, placement, purchase, metadata service, disk.

Two are made where there are elastic nodes: EC2 takes no subnet beside network interfaces in one request, so the fixed
nodes' template names the subnet on each interface; an Auto Scaling group brings its own subnet, so its template
must not.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import pulumi
import pulumi_aws as aws

from infra.catalogue import InstanceType, Interface, efa_layout
from infra.components.access import Access
from infra.components.naming import Naming
from infra.config import ClusterConfig

# Unattended upgrades change kernel and driver under a running job; Ansible holds packages later, this acts first.
CLOUD_CONFIG = """#cloud-config
package_update: false
package_upgrade: false
bootcmd:
  - [systemctl, mask, --now, apt-daily.timer, apt-daily-upgrade.timer, unattended-upgrades.service]
"""
ROOT_DEVICE = "/dev/sda1"


@dataclass(frozen=True)
class Purchase:
    """How the template's instances are bought. `reservation_id` is set for reservations and capacity blocks."""

    capacity: str
    reservation_id: pulumi.Output[str] | None = None


def layout_of(config: ClusterConfig, item: InstanceType) -> tuple[Interface, ...]:
    """The interfaces that nodes of this type get under this configuration."""
    return efa_layout(item, efa=config.efa != "never", single=config.gpu_public_ip)


def interface_arguments(
    layout: tuple[Interface, ...],
    *,
    cluster_group: pulumi.Input[str],
    efa_group: pulumi.Input[str],
    subnet_id: pulumi.Input[str] | None,
    public_ip: bool,
) -> list[dict[str, Any]]:
    """Network interfaces of a launch template. The group follows the interface: ENA cluster, EFA-only efa, EFA both."""
    groups: dict[str, list[pulumi.Input[str]]] = {
        "interface": [cluster_group],
        "efa-only": [efa_group],
        "efa": [cluster_group, efa_group],
    }
    arguments: list[dict[str, Any]] = []
    for interface in layout:
        entry: dict[str, Any] = {
            "network_card_index": interface.card,
            "device_index": interface.device,
            "interface_type": interface.kind,
            "security_groups": groups[interface.kind],
            "delete_on_termination": "true",
        }
        if subnet_id is not None:
            entry["subnet_id"] = subnet_id
        # EC2 accepts this field only in a request with one interface, so it is absent otherwise.
        if public_ip and len(layout) == 1:
            entry["associate_public_ip_address"] = "true"
        arguments.append(entry)
    return arguments


def metadata_options(*, containers: bool) -> Any:
    """IMDSv2 only. A container is one hop further from the metadata service."""
    return {
        "http_endpoint": "enabled",
        "http_tokens": "required",
        "http_put_response_hop_limit": 2 if containers else 1,
        "instance_metadata_tags": "enabled",
    }


def purchase_arguments(purchase: Purchase) -> dict[str, Any]:
    """The template's market and reservation options."""
    if purchase.capacity == "spot":
        spot = {"spot_instance_type": "one-time", "instance_interruption_behavior": "terminate"}
        return {"instance_market_options": {"market_type": "spot", "spot_options": spot}}
    if purchase.reservation_id is None:
        return {"capacity_reservation_specification": {"capacity_reservation_preference": "none"}}
    target = {"capacity_reservation_target": {"capacity_reservation_id": purchase.reservation_id}}
    arguments: dict[str, Any] = {"capacity_reservation_specification": target}
    if purchase.capacity == "capacity-block":
        arguments["instance_market_options"] = {"market_type": "capacity-block"}
    return arguments


def tag_specifications(naming: Naming, part: str, role: str) -> list[dict[str, Any]]:
    """Tags for what a launch makes: the instance, its disks and its interfaces."""
    tags = naming.tags(part, role=role)
    return [{"resource_type": kind, "tags": tags} for kind in ("instance", "volume", "network-interface")]


def node_template(
    part: str,
    config: ClusterConfig,
    item: InstanceType,
    access: Access,
    *,
    image_id: str,
    subnet_id: pulumi.Input[str] | None,
    group: aws.ec2.PlacementGroup | None,
    purchase: Purchase,
    parent: pulumi.Resource,
) -> aws.ec2.LaunchTemplate:
    """The launch template of nodes of one type. An image that was looked up stays until `amiId` names one."""
    naming = Naming.of(config)
    keep = [] if config.ami_id or config.node_updates == "replace" else ["image_id"]
    interfaces: list[Any] = interface_arguments(
        layout_of(config, item),
        cluster_group=access.cluster_group.id,
        efa_group=access.efa_group.id,
        subnet_id=subnet_id,
        public_ip=config.gpu_public_ip,
    )
    specifications: list[Any] = tag_specifications(naming, part, "gpu")
    mappings: list[Any] = [{"device_name": ROOT_DEVICE, "ebs": root_disk(config)}]
    return aws.ec2.LaunchTemplate(
        naming.name(part),
        description=f"{item.name} nodes of {config.name}",
        instance_type=item.name,
        image_id=image_id,
        key_name=access.key_name,
        iam_instance_profile={"arn": access.node_profile.arn},
        network_interfaces=interfaces,
        placement={"group_name": group.name} if group else None,
        metadata_options=metadata_options(containers=config.containers),
        block_device_mappings=mappings,
        ebs_optimized="true",
        monitoring={"enabled": True},
        instance_initiated_shutdown_behavior="terminate",
        user_data=base64.b64encode(CLOUD_CONFIG.encode()).decode(),
        update_default_version=True,
        tag_specifications=specifications,
        tags=naming.tags(part),
        opts=pulumi.ResourceOptions(parent=parent, ignore_changes=keep),
        **purchase_arguments(purchase),
    )


def root_disk(config: ClusterConfig) -> dict[str, Any]:
    """Encrypted gp3 root disk that goes with its instance."""
    disk: dict[str, Any] = {
        "volume_size": config.root_volume_gib,
        "volume_type": "gp3",
        "encrypted": "true",
        "delete_on_termination": "true",
    }
    return {**disk, "kms_key_id": config.kms_key_arn} if config.kms_key_arn else disk
