"""Head node and the fixed GPU nodes.

Each fixed node is an instance of its own with a number, so a changed `nodeCount` adds or removes the last ones and
touches no other. A running node is not replaced when the template changes (`nodeUpdates: keep`).
"""

from __future__ import annotations

from typing import Any

import pulumi
import pulumi_aws as aws

from infra.catalogue import instance_type
from infra.components.access import Access
from infra.components.naming import Naming
from infra.components.network import Network
from infra.components.storage import NFS_DEVICE, Storage
from infra.components.template import CLOUD_CONFIG, Purchase, metadata_options, node_template
from infra.config import ClusterConfig

PLATFORM = "Linux/UNIX"


class Compute(pulumi.ComponentResource):
    """`head`, `head_address`, `nodes`, `placement`, `purchase`."""

    def __init__(
        self,
        config: ClusterConfig,
        network: Network,
        access: Access,
        storage: Storage,
        *,
        gpu_image_id: str,
        head_image_id: str,
    ) -> None:
        self._naming = Naming.of(config)
        super().__init__("loopworks:aws:Compute", self._naming.name("compute"))
        self._config, self._access = config, access
        self._child = pulumi.ResourceOptions(parent=self)
        self.placement = self._placement_group()
        self.purchase = Purchase(config.capacity, self._reservation(network))
        self.head_address: aws.ec2.Eip | None = None
        self.head = self._head(network, storage, head_image_id)
        self.template = node_template(
            "gpu",
            config,
            instance_type(config.instance_type),
            access,
            image_id=gpu_image_id,
            subnet_id=network.gpu_subnet_id,
            group=self.placement,
            purchase=self.purchase,
            parent=self,
        )
        self.nodes = [self._node(index) for index in range(config.node_count)]
        self.register_outputs({"head": self.head.id, "nodes": [node.id for node in self.nodes]})

    def _placement_group(self) -> aws.ec2.PlacementGroup | None:
        if not self._config.use_placement_group or not instance_type(self._config.instance_type).cluster_placement:
            return None
        naming = self._naming
        return aws.ec2.PlacementGroup(
            naming.name("nodes"), strategy="cluster", tags=naming.tags("nodes"), opts=self._child
        )

    def _reservation(self, network: Network) -> pulumi.Output[str] | None:
        config, naming = self._config, self._naming
        if config.reservation_id:
            return pulumi.Output.from_input(config.reservation_id)
        if config.capacity == "capacity-block":
            # Paid in full when made, and nothing gives the money back: so destroy and replace leave it alone.
            block = aws.ec2.CapacityBlockReservation(
                naming.name("block"),
                capacity_block_offering_id=config.capacity_block_offering_id,
                instance_platform=PLATFORM,
                tags=naming.tags("block"),
                opts=pulumi.ResourceOptions(parent=self, protect=True, retain_on_delete=True),
            )
            block_id: pulumi.Output[str] = block.id
            return block_id
        if config.capacity != "reservation":
            return None
        # Made inside the placement group: all nodes' capacity comes in one request, near each other, or not at all.
        reservation = aws.ec2.CapacityReservation(
            naming.name("nodes"),
            availability_zone=network.zone,
            instance_type=config.instance_type,
            instance_platform=PLATFORM,
            instance_count=config.node_count,
            instance_match_criteria="targeted",
            placement_group_arn=self.placement.arn if self.placement else None,
            tags=naming.tags("nodes"),
            opts=self._child,
        )
        reservation_id: pulumi.Output[str] = reservation.id
        return reservation_id

    def _node(self, index: int) -> aws.ec2.Instance:
        part = f"gpu-{index + 1:04d}"
        keep = ["launch_template"] if self._config.node_updates == "keep" else []
        return aws.ec2.Instance(
            self._naming.name(part),
            launch_template={
                "id": self.template.id,
                "version": self.template.latest_version.apply(lambda number: str(int(number))),
            },
            tags=self._naming.tags(part, role="gpu"),
            # The old node must go first: a reservation or a quota has no room for both.
            opts=pulumi.ResourceOptions(parent=self, ignore_changes=keep, delete_before_replace=True),
        )

    def _head(self, network: Network, storage: Storage, image_id: str) -> aws.ec2.Instance:
        config, naming, access = self._config, self._naming, self._access
        keep = [] if config.head_ami_id else ["ami"]
        # Tags stand on the disk: `volume_tags` of an instance would fight with the tags of attached volumes.
        disk: Any = {
            "volume_size": config.head_volume_gib,
            "volume_type": "gp3",
            "encrypted": True,
            "tags": naming.tags("head"),
        }
        if config.kms_key_arn:
            disk["kms_key_id"] = config.kms_key_arn
        head = aws.ec2.Instance(
            naming.name("head"),
            instance_type=config.head_instance_type,
            ami=image_id,
            key_name=access.key_name,
            iam_instance_profile=access.head_profile.name,
            subnet_id=network.public_subnet_id if config.head_public_ip else network.gpu_subnet_id,
            vpc_security_group_ids=[access.cluster_group.id, access.head_group.id],
            metadata_options=metadata_options(containers=config.containers),
            root_block_device=disk,
            ebs_optimized=True,
            monitoring=True,
            user_data=CLOUD_CONFIG,
            tags=naming.tags("head", role="head"),
            opts=pulumi.ResourceOptions(parent=self, ignore_changes=keep),
        )
        if config.head_public_ip:
            self.head_address = aws.ec2.Eip(
                naming.name("head-ip"), domain="vpc", instance=head.id, tags=naming.tags("head"), opts=self._child
            )
        if storage.nfs_volume:
            aws.ec2.VolumeAttachment(
                naming.name("nfs"),
                device_name=NFS_DEVICE,
                instance_id=head.id,
                volume_id=storage.nfs_volume.id,
                stop_instance_before_detaching=True,
                opts=self._child,
            )
        return head
