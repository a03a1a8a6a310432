"""Checkpoint bucket and the shared file system.

The bucket is the one thing that must outlive the cluster: protected and left behind on destroy unless
`dataOnDestroy: purge`. A file system whose content is exported to the bucket is not protected; one that holds
the only copy is.
"""

from __future__ import annotations

import json
from typing import Any

import pulumi
import pulumi_aws as aws

from infra.components.access import Access
from infra.components.naming import Naming
from infra.components.network import Network
from infra.config import ClusterConfig

LUSTRE_OPTIONS = "relatime,flock,_netdev"
NFS_OPTIONS = "nfsvers=4.1,rsize=1048576,wsize=1048576,hard,timeo=600,retrans=2,noresvport,_netdev"
DRA_EVENTS = ["NEW", "CHANGED", "DELETED"]
NFS_DEVICE = "/dev/sdf"


class Storage(pulumi.ComponentResource):
    """`bucket` and `shared` (a mapping of mount facts after the outputs contract)."""

    def __init__(self, config: ClusterConfig, network: Network, access: Access) -> None:
        self._naming = Naming.of(config)
        super().__init__("loopworks:aws:Storage", self._naming.name("storage"))
        self._config = config
        self._keep = config.data_on_destroy == "keep"
        self._child = pulumi.ResourceOptions(parent=self)
        self.bucket = self._bucket()
        access.allow_bucket(self.bucket.arn, config.kms_key_arn)
        self.nfs_volume: aws.ebs.Volume | None = None
        self.shared = self._shared(network, access)
        self.register_outputs({"bucket": self.bucket.bucket, "shared": self.shared})

    def _data_options(self, *, only_copy: bool = True) -> pulumi.ResourceOptions:
        guard = self._keep and only_copy
        return pulumi.ResourceOptions(parent=self, protect=guard, retain_on_delete=guard)

    def _data_tags(self, part: str, *, only_copy: bool = True) -> dict[str, str]:
        return self._naming.tags(part, data="keep" if self._keep and only_copy else "disposable")

    def _bucket(self) -> aws.s3.Bucket:
        naming, config = self._naming, self._config
        bucket = aws.s3.Bucket(
            naming.name("checkpoints"),
            bucket=config.checkpoint_bucket or None,
            force_destroy=not self._keep,
            tags=self._data_tags("checkpoints"),
            opts=self._data_options(),
        )
        # What guards the bucket stays with it: a bucket left behind without its policy would be worse than none.
        options = pulumi.ResourceOptions(parent=bucket, retain_on_delete=self._keep)
        name = bucket.bucket
        versioning = aws.s3.BucketVersioning(
            naming.name("versions"), bucket=name, versioning_configuration={"status": "Enabled"}, opts=options
        )
        aws.s3.BucketServerSideEncryptionConfiguration(
            naming.name("encryption"), bucket=name, rules=[encryption_rule(config.kms_key_arn)], opts=options
        )
        block = aws.s3.BucketPublicAccessBlock(
            naming.name("not-public"),
            bucket=name,
            block_public_acls=True,
            block_public_policy=True,
            ignore_public_acls=True,
            restrict_public_buckets=True,
            opts=options,
        )
        aws.s3.BucketOwnershipControls(
            naming.name("owner"), bucket=name, rule={"object_ownership": "BucketOwnerEnforced"}, opts=options
        )
        after_block = pulumi.ResourceOptions.merge(options, pulumi.ResourceOptions(depends_on=[block]))
        aws.s3.BucketPolicy(
            naming.name("tls-only"), bucket=name, policy=bucket.arn.apply(tls_only_policy), opts=after_block
        )
        after_versions = pulumi.ResourceOptions.merge(options, pulumi.ResourceOptions(depends_on=[versioning]))
        rules: list[Any] = lifecycle_rules(config.checkpoint_noncurrent_days)
        aws.s3.BucketLifecycleConfiguration(naming.name("lifecycle"), bucket=name, rules=rules, opts=after_versions)
        return bucket

    def _shared(self, network: Network, access: Access) -> dict[str, Any]:
        kind = self._config.shared_storage
        if kind == "fsx-lustre":
            return self._lustre(network, access)
        if kind == "efs":
            return self._efs(network, access)
        if kind == "nfs":
            return self._nfs(network)
        return mount_facts("none", "", "", "", "")

    def _lustre(self, network: Network, access: Access) -> dict[str, Any]:
        config, naming = self._config, self._naming
        exported = bool(config.fsx_s3_prefix)
        scratch = config.fsx_deployment == "SCRATCH_2"
        assert access.storage_group is not None
        groups = [access.storage_group.id, *([access.efa_group.id] if config.fsx_efa else [])]
        options = self._data_options(only_copy=not exported and not scratch)
        system = aws.fsx.LustreFileSystem(
            naming.name("lustre"),
            subnet_ids=network.gpu_subnet_id,
            storage_capacity=config.fsx_capacity_gib,
            storage_type="SSD",
            deployment_type=config.fsx_deployment,
            per_unit_storage_throughput=config.fsx_throughput or None,
            file_system_type_version=config.fsx_version,
            data_compression_type="LZ4",
            efa_enabled=True if config.fsx_efa else None,
            metadata_configuration=metadata_configuration(config.fsx_metadata_iops),
            kms_key_id=None if scratch else config.kms_key_arn or None,  # scratch is encrypted by FSx's own key
            security_group_ids=groups,
            copy_tags_to_backups=True if not scratch and not exported else None,
            tags=self._data_tags("lustre", only_copy=not exported and not scratch),
            opts=options,
        )
        if exported:
            aws.fsx.DataRepositoryAssociation(
                naming.name("lustre-s3"),
                file_system_id=system.id,
                data_repository_path=pulumi.Output.concat("s3://", self.bucket.bucket, "/", config.fsx_s3_prefix),
                file_system_path="/data",
                batch_import_meta_data_on_create=True,
                s3={"auto_import_policy": {"events": DRA_EVENTS}, "auto_export_policy": {"events": DRA_EVENTS}},
                tags=naming.tags("lustre-s3"),
                opts=self._child,
            )
        source = pulumi.Output.concat(system.dns_name, "@tcp:/", system.mount_name)
        return mount_facts("fsx-lustre", source, "lustre", LUSTRE_OPTIONS, config.mount_point, id=system.id)

    def _efs(self, network: Network, access: Access) -> dict[str, Any]:
        config, naming = self._config, self._naming
        system = aws.efs.FileSystem(
            naming.name("efs"),
            encrypted=True,
            kms_key_id=config.kms_key_arn or None,
            throughput_mode="elastic",
            tags=self._data_tags("efs"),
            opts=self._data_options(),
        )
        assert access.storage_group is not None
        aws.efs.MountTarget(
            naming.name("efs"),
            file_system_id=system.id,
            subnet_id=network.gpu_subnet_id,
            security_groups=[access.storage_group.id],
            opts=self._child,
        )
        source = pulumi.Output.concat(system.dns_name, ":/")
        return mount_facts("efs", source, "nfs4", NFS_OPTIONS, config.mount_point, id=system.id)

    def _nfs(self, network: Network) -> dict[str, Any]:
        config = self._config
        self.nfs_volume = aws.ebs.Volume(
            self._naming.name("nfs"),
            availability_zone=network.zone,
            size=config.nfs_volume_gib,
            type="gp3",
            encrypted=True,
            kms_key_id=config.kms_key_arn or None,
            tags=self._data_tags("nfs"),
            opts=self._data_options(),
        )
        # The source is the head's address, known when it exists: infra/outputs.py fills it in.
        return mount_facts("nfs", "", "nfs4", NFS_OPTIONS, config.mount_point, id=self.nfs_volume.id)


def mount_facts(
    kind: str,
    source: pulumi.Input[str],
    fstype: str,
    options: str,
    mount_point: str,
    **extra: pulumi.Input[str],
) -> dict[str, Any]:
    """The part `storage` of the outputs contract."""
    facts = {"kind": kind, "source": source, "fstype": fstype, "options": options, "mount_point": mount_point}
    return {**facts, "id": extra.get("id", "")}


def metadata_configuration(iops: int) -> Any:
    """Provisioned metadata IOPS, or nothing where FSx chooses."""
    return {"mode": "USER_PROVISIONED", "iops": iops} if iops else None


def encryption_rule(kms_key_arn: str) -> Any:
    """Default encryption of new objects; a key of one's own is cached per bucket to save KMS calls."""
    if not kms_key_arn:
        return {"apply_server_side_encryption_by_default": {"sse_algorithm": "AES256"}}
    by_default = {"sse_algorithm": "aws:kms", "kms_master_key_id": kms_key_arn}
    return {"apply_server_side_encryption_by_default": by_default, "bucket_key_enabled": True}


def lifecycle_rules(noncurrent_days: int) -> list[dict[str, Any]]:
    """Overwritten objects go after some days, broken multipart uploads after a week."""
    everything = {"prefix": ""}
    return [
        {
            "id": "old-versions",
            "status": "Enabled",
            "filter": everything,
            "noncurrent_version_expiration": {"noncurrent_days": noncurrent_days},
        },
        {
            "id": "broken-uploads",
            "status": "Enabled",
            "filter": everything,
            "abort_incomplete_multipart_upload": {"days_after_initiation": 7},
        },
    ]


def tls_only_policy(bucket_arn: str) -> str:
    """Refuse every request that is not over TLS."""
    statement = {
        "Sid": "TlsOnly",
        "Effect": "Deny",
        "Principal": "*",
        "Action": "s3:*",
        "Resource": [bucket_arn, f"{bucket_arn}/*"],
        "Condition": {"Bool": {"aws:SecureTransport": "false"}},
    }
    return json.dumps({"Version": "2012-10-17", "Statement": [statement]})
