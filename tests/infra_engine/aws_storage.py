"""S3, FSx for Lustre, EFS, EBS volumes."""

from __future__ import annotations

from typing import Any

from tests.infra_engine.aws_network import retag
from tests.infra_engine.cloud import Cloud
from tests.infra_engine.provider import Created, Handler, Inputs, api, tag_list, tag_specification


def _bucket(cloud: Cloud, inputs: Inputs) -> Created:
    name = inputs["bucket"]
    cloud.client("s3").create_bucket(Bucket=name)
    cloud.client("s3").put_bucket_tagging(Bucket=name, Tagging={"TagSet": tag_list(inputs)})
    return name, {"arn": f"arn:aws:s3:::{name}"}


def _update_bucket(
    cloud: Cloud, id_: str, inputs: Inputs, changed: tuple[str, ...], outputs: dict[str, Any]
) -> dict[str, Any]:
    if set(changed) - {"tags", "forceDestroy"}:
        raise NotImplementedError(f"the test engine cannot change {', '.join(changed)} of a bucket")
    cloud.client("s3").put_bucket_tagging(Bucket=id_, Tagging={"TagSet": tag_list(inputs)})
    return {}


def _delete_bucket(cloud: Cloud, id_: str, inputs: Inputs, outputs: dict[str, Any]) -> None:
    s3 = cloud.client("s3")
    if inputs.get("forceDestroy"):
        versions = s3.list_object_versions(Bucket=id_)
        for entry in [*versions.get("Versions", []), *versions.get("DeleteMarkers", [])]:
            s3.delete_object(Bucket=id_, Key=entry["Key"], VersionId=entry["VersionId"])
    s3.delete_bucket(Bucket=id_)  # fails while the bucket holds anything, as the provider does


def _versioning(cloud: Cloud, inputs: Inputs) -> Created:
    configuration = api(inputs["versioningConfiguration"])
    cloud.client("s3").put_bucket_versioning(Bucket=inputs["bucket"], VersioningConfiguration=configuration)
    return inputs["bucket"], {}


def _encryption(cloud: Cloud, inputs: Inputs) -> Created:
    rules = []
    for rule in inputs["rules"]:
        default = rule["applyServerSideEncryptionByDefault"]
        entry: dict[str, Any] = {"SSEAlgorithm": default["sseAlgorithm"]}
        if "kmsMasterKeyId" in default:
            entry["KMSMasterKeyID"] = default["kmsMasterKeyId"]
        key = {"BucketKeyEnabled": rule["bucketKeyEnabled"]} if "bucketKeyEnabled" in rule else {}
        rules.append({"ApplyServerSideEncryptionByDefault": entry, **key})
    cloud.client("s3").put_bucket_encryption(
        Bucket=inputs["bucket"], ServerSideEncryptionConfiguration={"Rules": rules}
    )
    return inputs["bucket"], {}


def _public_access(cloud: Cloud, inputs: Inputs) -> Created:
    keys = ("blockPublicAcls", "blockPublicPolicy", "ignorePublicAcls", "restrictPublicBuckets")
    configuration = api({key: inputs[key] for key in keys})
    cloud.client("s3").put_public_access_block(Bucket=inputs["bucket"], PublicAccessBlockConfiguration=configuration)
    return inputs["bucket"], {}


def _ownership(cloud: Cloud, inputs: Inputs) -> Created:
    cloud.client("s3").put_bucket_ownership_controls(
        Bucket=inputs["bucket"], OwnershipControls={"Rules": [api(inputs["rule"])]}
    )
    return inputs["bucket"], {}


def _policy(cloud: Cloud, inputs: Inputs) -> Created:
    cloud.client("s3").put_bucket_policy(Bucket=inputs["bucket"], Policy=inputs["policy"])
    return inputs["bucket"], {}


def _lifecycle(cloud: Cloud, inputs: Inputs) -> Created:
    rules = [{("ID" if key == "id" else key): item for key, item in rule.items()} for rule in inputs["rules"]]
    cloud.client("s3").put_bucket_lifecycle_configuration(
        Bucket=inputs["bucket"], LifecycleConfiguration={"Rules": api(rules)}
    )
    return inputs["bucket"], {}


def _lustre(cloud: Cloud, inputs: Inputs) -> Created:
    configuration: dict[str, Any] = {
        "DeploymentType": inputs["deploymentType"],
        "DataCompressionType": inputs["dataCompressionType"],
    }
    optional = {
        "perUnitStorageThroughput": "PerUnitStorageThroughput",
        "efaEnabled": "EfaEnabled",
        "copyTagsToBackups": "CopyTagsToBackups",
    }
    configuration |= {name: inputs[key] for key, name in optional.items() if key in inputs}
    if "metadataConfiguration" in inputs:
        configuration["MetadataConfiguration"] = api(inputs["metadataConfiguration"])
    key = {"KmsKeyId": inputs["kmsKeyId"]} if "kmsKeyId" in inputs else {}
    answer = cloud.client("fsx").create_file_system(
        FileSystemType="LUSTRE",
        FileSystemTypeVersion=inputs["fileSystemTypeVersion"],
        StorageCapacity=inputs["storageCapacity"],
        StorageType=inputs["storageType"],
        SubnetIds=[inputs["subnetIds"]],
        SecurityGroupIds=inputs["securityGroupIds"],
        LustreConfiguration=configuration,
        Tags=tag_list(inputs),
        **key,
    )["FileSystem"]
    id_ = answer["FileSystemId"]
    # moto gives no mount name; the real one is eight characters of FSx's choice.
    return id_, {"dnsName": f"{id_}.fsx.us-east-1.amazonaws.com", "mountName": "mnt" + id_[-5:], "arn": id_}


def _delete_lustre(cloud: Cloud, id_: str, inputs: Inputs, outputs: dict[str, Any]) -> None:
    cloud.client("fsx").delete_file_system(FileSystemId=id_)


def _repository(cloud: Cloud, inputs: Inputs) -> Created:
    s3 = {
        name: api(inputs["s3"][key])
        for key, name in (("autoImportPolicy", "AutoImportPolicy"), ("autoExportPolicy", "AutoExportPolicy"))
    }
    answer = cloud.client("fsx").create_data_repository_association(
        FileSystemId=inputs["fileSystemId"],
        FileSystemPath=inputs["fileSystemPath"],
        DataRepositoryPath=inputs["dataRepositoryPath"],
        BatchImportMetaDataOnCreate=inputs["batchImportMetaDataOnCreate"],
        S3=s3,
        Tags=tag_list(inputs),
    )
    return answer["Association"]["AssociationId"], {}


def _delete_repository(cloud: Cloud, id_: str, inputs: Inputs, outputs: dict[str, Any]) -> None:
    cloud.client("fsx").delete_data_repository_association(AssociationId=id_)


def _efs(cloud: Cloud, inputs: Inputs) -> Created:
    key = {"KmsKeyId": inputs["kmsKeyId"]} if "kmsKeyId" in inputs else {}
    answer = cloud.client("efs").create_file_system(
        CreationToken=inputs["tags"]["Name"],
        Encrypted=inputs["encrypted"],
        ThroughputMode=inputs["throughputMode"],
        Tags=tag_list(inputs),
        **key,
    )
    return answer["FileSystemId"], {"dnsName": f"{answer['FileSystemId']}.efs.us-east-1.amazonaws.com"}


def _delete_efs(cloud: Cloud, id_: str, inputs: Inputs, outputs: dict[str, Any]) -> None:
    cloud.client("efs").delete_file_system(FileSystemId=id_)


def _mount_target(cloud: Cloud, inputs: Inputs) -> Created:
    answer = cloud.client("efs").create_mount_target(
        FileSystemId=inputs["fileSystemId"], SubnetId=inputs["subnetId"], SecurityGroups=inputs["securityGroups"]
    )
    return answer["MountTargetId"], {}


def _delete_mount_target(cloud: Cloud, id_: str, inputs: Inputs, outputs: dict[str, Any]) -> None:
    cloud.client("efs").delete_mount_target(MountTargetId=id_)


def _volume(cloud: Cloud, inputs: Inputs) -> Created:
    key = {"KmsKeyId": inputs["kmsKeyId"]} if "kmsKeyId" in inputs else {}
    answer = cloud.client("ec2").create_volume(
        AvailabilityZone=inputs["availabilityZone"],
        Size=inputs["size"],
        VolumeType=inputs["type"],
        Encrypted=inputs["encrypted"],
        TagSpecifications=tag_specification(inputs, "volume"),
        **key,
    )
    return answer["VolumeId"], {}


def _delete_volume(cloud: Cloud, id_: str, inputs: Inputs, outputs: dict[str, Any]) -> None:
    cloud.client("ec2").delete_volume(VolumeId=id_)


def _attachment(cloud: Cloud, inputs: Inputs) -> Created:
    cloud.client("ec2").attach_volume(
        Device=inputs["deviceName"], InstanceId=inputs["instanceId"], VolumeId=inputs["volumeId"]
    )
    return f"vai-{inputs['volumeId']}", {}


def _detach(cloud: Cloud, id_: str, inputs: Inputs, outputs: dict[str, Any]) -> None:
    cloud.client("ec2").detach_volume(InstanceId=inputs["instanceId"], VolumeId=inputs["volumeId"])


HANDLERS = {
    "aws:s3/bucket:Bucket": Handler(_bucket, _delete_bucket, _update_bucket, name_property="bucket"),
    "aws:s3/bucketVersioning:BucketVersioning": Handler(_versioning, put_again=True),
    "aws:s3/bucketServerSideEncryptionConfiguration:BucketServerSideEncryptionConfiguration": Handler(
        _encryption, put_again=True
    ),
    "aws:s3/bucketPublicAccessBlock:BucketPublicAccessBlock": Handler(_public_access, put_again=True),
    "aws:s3/bucketOwnershipControls:BucketOwnershipControls": Handler(_ownership, put_again=True),
    "aws:s3/bucketPolicy:BucketPolicy": Handler(_policy, put_again=True),
    "aws:s3/bucketLifecycleConfiguration:BucketLifecycleConfiguration": Handler(_lifecycle, put_again=True),
    "aws:fsx/lustreFileSystem:LustreFileSystem": Handler(_lustre, _delete_lustre),
    "aws:fsx/dataRepositoryAssociation:DataRepositoryAssociation": Handler(_repository, _delete_repository),
    "aws:efs/fileSystem:FileSystem": Handler(_efs, _delete_efs),
    "aws:efs/mountTarget:MountTarget": Handler(_mount_target, _delete_mount_target),
    "aws:ebs/volume:Volume": Handler(_volume, _delete_volume, retag),
    "aws:ec2/volumeAttachment:VolumeAttachment": Handler(_attachment, _detach),
}
