"""VPC, subnets, routes, endpoints, security groups."""

from __future__ import annotations

from typing import Any

from tests.infra_engine.cloud import Cloud
from tests.infra_engine.provider import Created, Handler, Inputs, tag_list, tag_specification

ALL = "-1"


def _vpc(cloud: Cloud, inputs: Inputs) -> Created:
    ec2 = cloud.client("ec2")
    tags = tag_specification(inputs, "vpc")
    vpc_id = ec2.create_vpc(CidrBlock=inputs["cidrBlock"], TagSpecifications=tags)["Vpc"]["VpcId"]
    for key, name in (("enableDnsSupport", "EnableDnsSupport"), ("enableDnsHostnames", "EnableDnsHostnames")):
        ec2.modify_vpc_attribute(VpcId=vpc_id, **{name: {"Value": inputs[key]}})
    return vpc_id, {"arn": f"arn:aws:ec2:us-east-1:{cloud.account}:vpc/{vpc_id}"}


def _default_group(cloud: Cloud, inputs: Inputs) -> Created:
    ec2 = cloud.client("ec2")
    filters = [{"Name": "vpc-id", "Values": [inputs["vpcId"]]}, {"Name": "group-name", "Values": ["default"]}]
    group = ec2.describe_security_groups(Filters=filters)["SecurityGroups"][0]
    _strip(ec2, group)
    return group["GroupId"], {}


def _strip(ec2: Any, group: dict[str, Any]) -> None:
    if group["IpPermissions"]:
        ec2.revoke_security_group_ingress(GroupId=group["GroupId"], IpPermissions=group["IpPermissions"])
    if group["IpPermissionsEgress"]:
        ec2.revoke_security_group_egress(GroupId=group["GroupId"], IpPermissions=group["IpPermissionsEgress"])


def _subnet(cloud: Cloud, inputs: Inputs) -> Created:
    subnet = cloud.client("ec2").create_subnet(
        VpcId=inputs["vpcId"],
        CidrBlock=inputs["cidrBlock"],
        AvailabilityZone=inputs["availabilityZone"],
        TagSpecifications=tag_specification(inputs, "subnet"),
    )["Subnet"]
    return subnet["SubnetId"], {"availabilityZone": subnet["AvailabilityZone"], "arn": subnet["SubnetArn"]}


def _gateway(cloud: Cloud, inputs: Inputs) -> Created:
    ec2 = cloud.client("ec2")
    tags = tag_specification(inputs, "internet-gateway")
    gateway = ec2.create_internet_gateway(TagSpecifications=tags)["InternetGateway"]["InternetGatewayId"]
    ec2.attach_internet_gateway(InternetGatewayId=gateway, VpcId=inputs["vpcId"])
    return gateway, {}


def _delete_gateway(cloud: Cloud, id_: str, inputs: Inputs, outputs: dict[str, Any]) -> None:
    cloud.client("ec2").detach_internet_gateway(InternetGatewayId=id_, VpcId=inputs["vpcId"])
    cloud.client("ec2").delete_internet_gateway(InternetGatewayId=id_)


def _table(cloud: Cloud, inputs: Inputs) -> Created:
    tags = tag_specification(inputs, "route-table")
    answer = cloud.client("ec2").create_route_table(VpcId=inputs["vpcId"], TagSpecifications=tags)
    return answer["RouteTable"]["RouteTableId"], {}


def _association(cloud: Cloud, inputs: Inputs) -> Created:
    answer = cloud.client("ec2").associate_route_table(RouteTableId=inputs["routeTableId"], SubnetId=inputs["subnetId"])
    return answer["AssociationId"], {}


def _route(cloud: Cloud, inputs: Inputs) -> Created:
    targets = {"gatewayId": "GatewayId", "natGatewayId": "NatGatewayId"}
    target = {name: inputs[key] for key, name in targets.items() if key in inputs}
    destination = inputs["destinationCidrBlock"]
    cloud.client("ec2").create_route(RouteTableId=inputs["routeTableId"], DestinationCidrBlock=destination, **target)
    return f"{inputs['routeTableId']}/{destination}", {}


def _delete_route(cloud: Cloud, id_: str, inputs: Inputs, outputs: dict[str, Any]) -> None:
    cloud.client("ec2").delete_route(
        RouteTableId=inputs["routeTableId"], DestinationCidrBlock=inputs["destinationCidrBlock"]
    )


def _address(cloud: Cloud, inputs: Inputs) -> Created:
    ec2 = cloud.client("ec2")
    answer = ec2.allocate_address(Domain=inputs["domain"], TagSpecifications=tag_specification(inputs, "elastic-ip"))
    if "instance" in inputs:
        ec2.associate_address(AllocationId=answer["AllocationId"], InstanceId=inputs["instance"])
    return answer["AllocationId"], {"allocationId": answer["AllocationId"], "publicIp": answer["PublicIp"]}


def _delete_address(cloud: Cloud, id_: str, inputs: Inputs, outputs: dict[str, Any]) -> None:
    ec2 = cloud.client("ec2")
    address = ec2.describe_addresses(AllocationIds=[id_])["Addresses"][0]
    if address.get("AssociationId"):
        ec2.disassociate_address(AssociationId=address["AssociationId"])
    ec2.release_address(AllocationId=id_)


def _nat(cloud: Cloud, inputs: Inputs) -> Created:
    answer = cloud.client("ec2").create_nat_gateway(
        SubnetId=inputs["subnetId"],
        AllocationId=inputs["allocationId"],
        TagSpecifications=tag_specification(inputs, "natgateway"),
    )
    return answer["NatGateway"]["NatGatewayId"], {}


def _endpoint(cloud: Cloud, inputs: Inputs) -> Created:
    names = {
        "routeTableIds": "RouteTableIds",
        "subnetIds": "SubnetIds",
        "securityGroupIds": "SecurityGroupIds",
        "privateDnsEnabled": "PrivateDnsEnabled",
    }
    answer = cloud.client("ec2").create_vpc_endpoint(
        VpcId=inputs["vpcId"],
        ServiceName=inputs["serviceName"],
        VpcEndpointType=inputs["vpcEndpointType"],
        TagSpecifications=tag_specification(inputs, "vpc-endpoint"),
        **{name: inputs[key] for key, name in names.items() if key in inputs},
    )
    return answer["VpcEndpoint"]["VpcEndpointId"], {}


def _group(cloud: Cloud, inputs: Inputs) -> Created:
    ec2 = cloud.client("ec2")
    group_id = ec2.create_security_group(
        GroupName=inputs["name"],
        Description=inputs["description"],
        VpcId=inputs["vpcId"],
        TagSpecifications=tag_specification(inputs, "security-group"),
    )["GroupId"]
    # The provider takes the default rule "everything out" away; rules are resources of their own.
    _strip(ec2, ec2.describe_security_groups(GroupIds=[group_id])["SecurityGroups"][0])
    return group_id, {"arn": f"arn:aws:ec2:us-east-1:{cloud.account}:security-group/{group_id}"}


def _permission(inputs: Inputs) -> list[dict[str, Any]]:
    rule: dict[str, Any] = {"IpProtocol": inputs["ipProtocol"]}
    if inputs["ipProtocol"] != ALL:
        rule |= {"FromPort": inputs["fromPort"], "ToPort": inputs["toPort"]}
    description = {"Description": inputs["description"]}
    if "cidrIpv4" in inputs:
        rule["IpRanges"] = [{"CidrIp": inputs["cidrIpv4"], **description}]
    if "referencedSecurityGroupId" in inputs:
        rule["UserIdGroupPairs"] = [{"GroupId": inputs["referencedSecurityGroupId"], **description}]
    return [rule]


def _ingress(cloud: Cloud, inputs: Inputs) -> Created:
    answer = cloud.client("ec2").authorize_security_group_ingress(
        GroupId=inputs["securityGroupId"], IpPermissions=_permission(inputs)
    )
    return answer["SecurityGroupRules"][0]["SecurityGroupRuleId"], {}


def _egress(cloud: Cloud, inputs: Inputs) -> Created:
    answer = cloud.client("ec2").authorize_security_group_egress(
        GroupId=inputs["securityGroupId"], IpPermissions=_permission(inputs)
    )
    return answer["SecurityGroupRules"][0]["SecurityGroupRuleId"], {}


def _delete_ingress(cloud: Cloud, id_: str, inputs: Inputs, outputs: dict[str, Any]) -> None:
    cloud.client("ec2").revoke_security_group_ingress(
        GroupId=inputs["securityGroupId"], IpPermissions=_permission(inputs)
    )


def _delete_egress(cloud: Cloud, id_: str, inputs: Inputs, outputs: dict[str, Any]) -> None:
    cloud.client("ec2").revoke_security_group_egress(
        GroupId=inputs["securityGroupId"], IpPermissions=_permission(inputs)
    )


def _flow_log(cloud: Cloud, inputs: Inputs) -> Created:
    answer = cloud.client("ec2").create_flow_logs(
        ResourceIds=[inputs["vpcId"]],
        ResourceType="VPC",
        TrafficType=inputs["trafficType"],
        LogDestinationType=inputs["logDestinationType"],
        LogDestination=inputs["logDestination"],
        DeliverLogsPermissionArn=inputs["iamRoleArn"],
        TagSpecifications=tag_specification(inputs, "vpc-flow-log"),
    )
    if answer.get("Unsuccessful"):
        raise RuntimeError(answer["Unsuccessful"][0]["Error"]["Message"])
    return answer["FlowLogIds"][0], {}


def _by(operation: str, parameter: str, *, as_list: bool = False) -> Any:
    """A deleter that passes the id as one parameter."""

    def delete(cloud: Cloud, id_: str, inputs: Inputs, outputs: dict[str, Any]) -> None:
        getattr(cloud.client("ec2"), operation)(**{parameter: [id_] if as_list else id_})

    return delete


def retag(cloud: Cloud, id_: str, inputs: Inputs, changed: tuple[str, ...], outputs: dict[str, Any]) -> dict[str, Any]:
    """Change the tags of an EC2 resource; anything else is refused."""
    if set(changed) - {"tags"}:
        raise NotImplementedError(f"the test engine cannot change {', '.join(changed)}")
    cloud.client("ec2").create_tags(Resources=[id_], Tags=tag_list(inputs))
    return {}


HANDLERS = {
    "aws:ec2/vpc:Vpc": Handler(_vpc, _by("delete_vpc", "VpcId"), retag),
    "aws:ec2/defaultSecurityGroup:DefaultSecurityGroup": Handler(_default_group),
    "aws:ec2/subnet:Subnet": Handler(_subnet, _by("delete_subnet", "SubnetId"), retag),
    "aws:ec2/internetGateway:InternetGateway": Handler(_gateway, _delete_gateway, retag),
    "aws:ec2/routeTable:RouteTable": Handler(_table, _by("delete_route_table", "RouteTableId"), retag),
    "aws:ec2/routeTableAssociation:RouteTableAssociation": Handler(
        _association, _by("disassociate_route_table", "AssociationId")
    ),
    "aws:ec2/route:Route": Handler(_route, _delete_route),
    "aws:ec2/eip:Eip": Handler(_address, _delete_address, retag),
    "aws:ec2/natGateway:NatGateway": Handler(_nat, _by("delete_nat_gateway", "NatGatewayId"), retag),
    "aws:ec2/vpcEndpoint:VpcEndpoint": Handler(_endpoint, _by("delete_vpc_endpoints", "VpcEndpointIds", as_list=True)),
    "aws:ec2/securityGroup:SecurityGroup": Handler(
        _group, _by("delete_security_group", "GroupId"), retag, name_property="name"
    ),
    "aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule": Handler(_ingress, _delete_ingress),
    "aws:vpc/securityGroupEgressRule:SecurityGroupEgressRule": Handler(_egress, _delete_egress),
    "aws:ec2/flowLog:FlowLog": Handler(_flow_log, _by("delete_flow_logs", "FlowLogIds", as_list=True)),
}
