"""Launch templates, instances, placement, reservations, Auto Scaling."""

from __future__ import annotations

import base64
from typing import Any

from tests.infra_engine.aws_network import retag
from tests.infra_engine.cloud import Cloud
from tests.infra_engine.launch_rules import LaunchRefused, check_interfaces, check_template
from tests.infra_engine.provider import Created, Handler, Inputs, api, flags, tag_list, tag_specification

PLAIN_TEMPLATE_KEYS = (
    "imageId",
    "instanceType",
    "keyName",
    "instanceInitiatedShutdownBehavior",
    "userData",
    "monitoring",
    "metadataOptions",
    "placement",
    "iamInstanceProfile",
    "instanceMarketOptions",
    "capacityReservationSpecification",
)


def template_data(inputs: Inputs) -> dict[str, Any]:
    """The program's launch template as the EC2 API takes it."""
    data: dict[str, Any] = {
        api({key: None}).popitem()[0]: api(inputs[key]) for key in PLAIN_TEMPLATE_KEYS if key in inputs
    }
    data["EbsOptimized"] = inputs["ebsOptimized"] == "true"
    data["NetworkInterfaces"] = [_interface(entry) for entry in inputs["networkInterfaces"]]
    data["BlockDeviceMappings"] = [
        {"DeviceName": entry["deviceName"], "Ebs": flags(api(entry["ebs"]), "Encrypted", "DeleteOnTermination")}
        for entry in inputs["blockDeviceMappings"]
    ]
    data["TagSpecifications"] = [
        {"ResourceType": entry["resourceType"], "Tags": tag_list(entry)} for entry in inputs["tagSpecifications"]
    ]
    return data


def _interface(entry: dict[str, Any]) -> dict[str, Any]:
    fields = flags(api(entry), "DeleteOnTermination", "AssociatePublicIpAddress")
    fields["Groups"] = fields.pop("SecurityGroups")
    return fields


def _checked(cloud: Cloud, inputs: Inputs) -> dict[str, Any]:
    data = template_data(inputs)
    check_template(data)
    described = cloud.client("ec2").describe_instance_types(InstanceTypes=[data["InstanceType"]])
    check_interfaces(data["NetworkInterfaces"], described["InstanceTypes"][0]["NetworkInfo"])
    group = data.get("Placement", {}).get("GroupName")
    if group and group not in cloud.stand_ins.placement_groups:
        raise LaunchRefused(f"there is no placement group {group}")
    if data["ImageId"] not in cloud.stand_ins.images:
        raise LaunchRefused(f"there is no image {data['ImageId']}")
    return data


def _template(cloud: Cloud, inputs: Inputs) -> Created:
    answer = cloud.client("ec2").create_launch_template(
        LaunchTemplateName=inputs["name"],
        LaunchTemplateData=_checked(cloud, inputs),
        TagSpecifications=tag_specification(inputs, "launch-template"),
    )["LaunchTemplate"]
    return answer["LaunchTemplateId"], {"latestVersion": 1, "defaultVersion": 1}


def _new_version(
    cloud: Cloud, id_: str, inputs: Inputs, changed: tuple[str, ...], outputs: dict[str, Any]
) -> dict[str, Any]:
    answer = cloud.client("ec2").create_launch_template_version(
        LaunchTemplateId=id_, LaunchTemplateData=_checked(cloud, inputs)
    )
    number = answer["LaunchTemplateVersion"]["VersionNumber"]
    return {"latestVersion": number, "defaultVersion": number}


def _delete_template(cloud: Cloud, id_: str, inputs: Inputs, outputs: dict[str, Any]) -> None:
    cloud.client("ec2").delete_launch_template(LaunchTemplateId=id_)


def stored_template(cloud: Cloud, id_: str, version: str) -> dict[str, Any]:
    """The template's data as the API keeps it."""
    versions = cloud.client("ec2").describe_launch_template_versions(LaunchTemplateId=id_, Versions=[version])
    data: dict[str, Any] = versions["LaunchTemplateVersions"][0]["LaunchTemplateData"]
    return data


def _instance(cloud: Cloud, inputs: Inputs) -> Created:
    arguments: dict[str, Any] = {
        "MinCount": 1,
        "MaxCount": 1,
        "TagSpecifications": tag_specification(inputs, "instance"),
    }
    if "launchTemplate" in inputs:
        template = inputs["launchTemplate"]
        primary = stored_template(cloud, template["id"], template["version"])["NetworkInterfaces"][0]
        arguments["LaunchTemplate"] = {"LaunchTemplateId": template["id"], "Version": template["version"]}
        # moto does not carry the template's interfaces over; the primary is given again so that the subnet is right.
        kept = ("DeviceIndex", "SubnetId", "Groups", "DeleteOnTermination", "NetworkCardIndex", "InterfaceType")
        arguments["NetworkInterfaces"] = [{key: primary[key] for key in kept if key in primary}]
    else:
        arguments |= _plain_instance(inputs)
    instance = cloud.client("ec2").run_instances(**arguments)["Instances"][0]
    return instance["InstanceId"], {"privateIp": instance["PrivateIpAddress"], "arn": instance["InstanceId"]}


def _plain_instance(inputs: Inputs) -> dict[str, Any]:
    disk = {key: value for key, value in inputs["rootBlockDevice"].items() if key != "tags"}
    arguments: dict[str, Any] = {
        "ImageId": inputs["ami"],
        "InstanceType": inputs["instanceType"],
        "SubnetId": inputs["subnetId"],
        "SecurityGroupIds": inputs["vpcSecurityGroupIds"],
        "IamInstanceProfile": {"Name": inputs["iamInstanceProfile"]},
        "MetadataOptions": api(inputs["metadataOptions"]),
        "BlockDeviceMappings": [{"DeviceName": "/dev/sda1", "Ebs": api(disk)}],
        "UserData": base64.b64encode(inputs["userData"].encode()).decode(),
        "EbsOptimized": inputs["ebsOptimized"],
        "Monitoring": {"Enabled": inputs["monitoring"]},
    }
    return {**arguments, "KeyName": inputs["keyName"]} if "keyName" in inputs else arguments


def _delete_instance(cloud: Cloud, id_: str, inputs: Inputs, outputs: dict[str, Any]) -> None:
    cloud.client("ec2").terminate_instances(InstanceIds=[id_])


def _key_pair(cloud: Cloud, inputs: Inputs) -> Created:
    cloud.client("ec2").import_key_pair(
        KeyName=inputs["keyName"],
        PublicKeyMaterial=inputs["publicKey"].encode(),
        TagSpecifications=tag_specification(inputs, "key-pair"),
    )
    return inputs["keyName"], {}


def _delete_key_pair(cloud: Cloud, id_: str, inputs: Inputs, outputs: dict[str, Any]) -> None:
    cloud.client("ec2").delete_key_pair(KeyName=id_)


def _placement_group(cloud: Cloud, inputs: Inputs) -> Created:
    answer = cloud.client("ec2").create_placement_group(
        GroupName=inputs["name"],
        Strategy=inputs["strategy"],
        TagSpecifications=tag_specification(inputs, "placement-group"),
    )["PlacementGroup"]
    arn = f"arn:aws:ec2:us-east-1:{cloud.account}:placement-group/{inputs['name']}"
    return inputs["name"], {"arn": arn, "placementGroupId": answer["GroupId"]}


def _delete_placement_group(cloud: Cloud, id_: str, inputs: Inputs, outputs: dict[str, Any]) -> None:
    cloud.client("ec2").delete_placement_group(GroupName=id_)


def _reservation(cloud: Cloud, inputs: Inputs) -> Created:
    group = {"PlacementGroupArn": inputs["placementGroupArn"]} if "placementGroupArn" in inputs else {}
    answer = cloud.client("ec2").create_capacity_reservation(
        InstanceType=inputs["instanceType"],
        InstancePlatform=inputs["instancePlatform"],
        InstanceCount=inputs["instanceCount"],
        AvailabilityZone=inputs["availabilityZone"],
        InstanceMatchCriteria=inputs["instanceMatchCriteria"],
        TagSpecifications=tag_specification(inputs, "capacity-reservation"),
        **group,
    )["CapacityReservation"]
    return answer["CapacityReservationId"], {}


def _resize_reservation(
    cloud: Cloud, id_: str, inputs: Inputs, changed: tuple[str, ...], outputs: dict[str, Any]
) -> dict[str, Any]:
    cloud.client("ec2").modify_capacity_reservation(CapacityReservationId=id_, InstanceCount=inputs["instanceCount"])
    return {}


def _cancel_reservation(cloud: Cloud, id_: str, inputs: Inputs, outputs: dict[str, Any]) -> None:
    cloud.client("ec2").cancel_capacity_reservation(CapacityReservationId=id_)


def _block(cloud: Cloud, inputs: Inputs) -> Created:
    answer = cloud.client("ec2").purchase_capacity_block(
        CapacityBlockOfferingId=inputs["capacityBlockOfferingId"],
        InstancePlatform=inputs["instancePlatform"],
        TagSpecifications=tag_specification(inputs, "capacity-reservation"),
    )["CapacityReservation"]
    return answer["CapacityReservationId"], {}


def _group_arguments(inputs: Inputs) -> dict[str, Any]:
    template = inputs["launchTemplate"]
    return {
        "AutoScalingGroupName": inputs["name"],
        "MinSize": inputs["minSize"],
        "MaxSize": inputs["maxSize"],
        "VPCZoneIdentifier": ",".join(inputs["vpcZoneIdentifiers"]),
        "LaunchTemplate": {"LaunchTemplateId": template["id"], "Version": template["version"]},
        "HealthCheckType": inputs["healthCheckType"],
        "NewInstancesProtectedFromScaleIn": inputs["protectFromScaleIn"],
        "CapacityRebalance": inputs["capacityRebalance"],
    }


def _scaling_group(cloud: Cloud, inputs: Inputs) -> Created:
    template = inputs["launchTemplate"]
    data = stored_template(cloud, template["id"], template["version"])
    if any("SubnetId" in entry for entry in data["NetworkInterfaces"]):
        raise LaunchRefused("the template of an Auto Scaling group must not name a subnet")
    client = cloud.client("autoscaling")
    tags = [
        {"Key": tag["key"], "Value": tag["value"], "PropagateAtLaunch": tag["propagateAtLaunch"]}
        for tag in inputs["tags"]
    ]
    client.create_auto_scaling_group(
        **_group_arguments(inputs), DesiredCapacity=inputs.get("desiredCapacity", 0), Tags=tags
    )
    client.suspend_processes(AutoScalingGroupName=inputs["name"], ScalingProcesses=inputs["suspendedProcesses"])
    return inputs["name"], {"arn": f"arn:aws:autoscaling:us-east-1:{cloud.account}:group/{inputs['name']}"}


def _update_scaling_group(
    cloud: Cloud, id_: str, inputs: Inputs, changed: tuple[str, ...], outputs: dict[str, Any]
) -> dict[str, Any]:
    cloud.client("autoscaling").update_auto_scaling_group(**_group_arguments(inputs))
    return {}


def _delete_scaling_group(cloud: Cloud, id_: str, inputs: Inputs, outputs: dict[str, Any]) -> None:
    cloud.client("autoscaling").delete_auto_scaling_group(AutoScalingGroupName=id_, ForceDelete=inputs["forceDelete"])


def _schedule(cloud: Cloud, inputs: Inputs) -> Created:
    cloud.client("autoscaling").put_scheduled_update_group_action(
        AutoScalingGroupName=inputs["autoscalingGroupName"],
        ScheduledActionName=inputs["scheduledActionName"],
        StartTime=inputs["startTime"],
        TimeZone=inputs["timeZone"],
        MinSize=inputs["minSize"],
        MaxSize=inputs["maxSize"],
        DesiredCapacity=inputs["desiredCapacity"],
    )
    return inputs["scheduledActionName"], {}


def _delete_schedule(cloud: Cloud, id_: str, inputs: Inputs, outputs: dict[str, Any]) -> None:
    cloud.client("autoscaling").delete_scheduled_action(
        AutoScalingGroupName=inputs["autoscalingGroupName"], ScheduledActionName=id_
    )


HANDLERS = {
    "aws:ec2/launchTemplate:LaunchTemplate": Handler(_template, _delete_template, _new_version, name_property="name"),
    "aws:ec2/instance:Instance": Handler(_instance, _delete_instance, retag),
    "aws:ec2/keyPair:KeyPair": Handler(_key_pair, _delete_key_pair, name_property="keyName"),
    "aws:ec2/placementGroup:PlacementGroup": Handler(
        _placement_group, _delete_placement_group, retag, name_property="name"
    ),
    "aws:ec2/capacityReservation:CapacityReservation": Handler(_reservation, _cancel_reservation, _resize_reservation),
    "aws:ec2/capacityBlockReservation:CapacityBlockReservation": Handler(_block),
    "aws:autoscaling/group:Group": Handler(
        _scaling_group, _delete_scaling_group, _update_scaling_group, name_property="name"
    ),
    "aws:autoscaling/schedule:Schedule": Handler(_schedule, _delete_schedule, put_again=True),
}
