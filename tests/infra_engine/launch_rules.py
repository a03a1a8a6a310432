"""EC2's rules for the interfaces of a launch, which moto does not check.

Written from the API's own description of each type (DescribeInstanceTypes), apart from infra/catalogue, so that a
mistake there does not hide itself.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

EFA_KINDS = ("efa", "efa-only")


class LaunchRefused(Exception):
    """EC2 would refuse this launch template."""


def check_interfaces(interfaces: list[dict[str, Any]], network: dict[str, Any]) -> None:
    """Raise LaunchRefused where EC2 would refuse.

    `interfaces` as in RunInstances, `network` as NetworkInfo of the type in DescribeInstanceTypes.
    """
    cards = {card["NetworkCardIndex"]: card for card in network["NetworkCards"]}
    places = Counter((entry["NetworkCardIndex"], entry["DeviceIndex"]) for entry in interfaces)
    if any(count > 1 for count in places.values()):
        raise LaunchRefused(f"two interfaces in one place: {places.most_common(1)[0][0]}")
    if interfaces[0]["InterfaceType"] == "efa-only" or (0, 0) not in places:
        raise LaunchRefused("the primary interface must be card 0, device 0 and able to do IP")
    if len(interfaces) > network["MaximumNetworkInterfaces"]:
        raise LaunchRefused(f"{len(interfaces)} interfaces, at most {network['MaximumNetworkInterfaces']}")
    if len(interfaces) > 1 and any("AssociatePublicIpAddress" in entry for entry in interfaces):
        raise LaunchRefused("a public address needs a launch with one interface")
    efa = Counter(entry["NetworkCardIndex"] for entry in interfaces if entry["InterfaceType"] in EFA_KINDS)
    limit = network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 0)
    if sum(efa.values()) > limit or any(count > 1 for count in efa.values()):
        raise LaunchRefused(f"EFA by card {dict(efa)}; one a card and at most {limit}")
    for entry in interfaces:
        card = cards.get(entry["NetworkCardIndex"])
        if card is None:
            raise LaunchRefused(f"there is no network card {entry['NetworkCardIndex']}")
        if entry["DeviceIndex"] >= card["MaximumNetworkInterfaces"]:
            raise LaunchRefused(f"device index {entry['DeviceIndex']} on card {entry['NetworkCardIndex']}")
        if entry["InterfaceType"] not in card.get("InterfaceTypes", ["interface"]):
            raise LaunchRefused(f"card {entry['NetworkCardIndex']} cannot do {entry['InterfaceType']}")


def check_template(data: dict[str, Any]) -> None:
    """Raise LaunchRefused for combinations in a launch template that EC2 refuses."""
    if data.get("NetworkInterfaces") and (data.get("SecurityGroupIds") or data.get("SecurityGroups")):
        raise LaunchRefused("network interfaces and top-level security groups exclude each other")
    market = data.get("InstanceMarketOptions", {}).get("MarketType")
    target = data.get("CapacityReservationSpecification", {}).get("CapacityReservationTarget")
    if market == "capacity-block" and (not target or data.get("Placement", {}).get("GroupName")):
        raise LaunchRefused("a capacity block needs its reservation as target and no placement group")
    if market == "spot" and target:
        raise LaunchRefused("spot instances take no capacity reservation")
