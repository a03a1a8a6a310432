"""How instances are bought: on demand, spot, reservation, capacity block."""

from __future__ import annotations

import datetime as dt
import re

from infra.catalogue import InstanceType, instance_types, load_prices
from infra.config import ClusterConfig
from infra.findings import Finding, error, warning

MAX_BLOCK_NODES = 64
BLOCK_LEAD_OUT = dt.timedelta(minutes=30)  # instances of a block are terminated from 30 minutes before its end
BLOCK_DAYS = frozenset([*range(1, 15), *range(21, 183, 7)])


def parse_time(text: str) -> dt.datetime:
    """An RFC 3339 time as an aware UTC datetime. Raises ValueError where the text has no offset or is no time."""
    moment = dt.datetime.fromisoformat(text.replace("Z", "+00:00"))
    if moment.tzinfo is None:
        raise ValueError("no time zone")
    return moment.astimezone(dt.timezone.utc)


def check(config: ClusterConfig, *, now: dt.datetime) -> list[Finding]:
    """Findings about the purchase of capacity."""
    findings: list[Finding] = []
    item = instance_types().get(config.instance_type)
    if item:
        findings += _usage_class(config, item)
    if config.reservation_id and not re.fullmatch(r"cr-[0-9a-f]{8,17}", config.reservation_id):
        findings.append(error("reservationId", f"{config.reservation_id!r} is not a reservation id", "use cr-..."))
    if config.reservation_id and config.capacity in ("on-demand", "spot"):
        findings.append(
            error(
                "reservationId", f"capacity {config.capacity} does not use it", "set capacity: reservation or clear it"
            )
        )
    if config.capacity == "reservation":
        findings += _reservation(config)
    if config.capacity == "capacity-block":
        findings += _block(config, now)
    elif config.capacity_block_offering_id or config.capacity_block_start or config.capacity_block_end:
        findings.append(
            error(
                "capacity", "capacity block settings without capacity: capacity-block", "set it or clear the settings"
            )
        )
    return findings


def _usage_class(config: ClusterConfig, item: InstanceType) -> list[Finding]:
    wanted = "on-demand" if config.capacity == "reservation" else config.capacity
    if wanted not in item.usage_classes:
        return [
            error("capacity", f"{item.name} cannot be had as {wanted}", f"possible: {', '.join(item.usage_classes)}")
        ]
    prices = load_prices().instance_usd_per_hour
    if wanted == "on-demand" and item.name in prices and prices[item.name] is None:
        return [
            error(
                "capacity",
                f"AWS lists no on-demand price for {item.name}: it is sold as capacity block",
                "set capacity: capacity-block",
            )
        ]
    return []


def _reservation(config: ClusterConfig) -> list[Finding]:
    if not config.reservation_id and config.node_count == 0:
        return [error("nodeCount", "a reservation of no instances", "set nodeCount, or name an existing reservationId")]
    if config.reservation_id and config.placement_group == "auto":
        return [
            warning(
                "placementGroup",
                "the reservation must have been made inside this cluster's placement group",
                "set placementGroup: never for a reservation made elsewhere",
            )
        ]
    return []


def _block(config: ClusterConfig, now: dt.datetime) -> list[Finding]:
    findings: list[Finding] = []
    if config.placement_group == "always":
        findings.append(
            error("placementGroup", "a capacity block brings its own placement", "set placementGroup: auto or never")
        )
    if bool(config.reservation_id) == bool(config.capacity_block_offering_id):
        findings.append(
            error(
                "reservationId",
                "a capacity block needs exactly one of reservationId (bought already) and capacityBlockOfferingId",
                "name the one that applies",
            )
        )
    if config.capacity_block_offering_id and not config.confirm_capacity_block_purchase:
        findings.append(
            error(
                "confirmCapacityBlockPurchase",
                "a block is paid in full at once and cannot be cancelled",
                "read the offering's price, then set it to true",
            )
        )
    if config.max_nodes > MAX_BLOCK_NODES:
        findings.append(
            error(
                "nodeCount", f"a block has at most {MAX_BLOCK_NODES} instances, {config.max_nodes} wanted", "lower it"
            )
        )
    return findings + _block_times(config, now)


def _block_times(config: ClusterConfig, now: dt.datetime) -> list[Finding]:
    times: dict[str, dt.datetime] = {}
    for key, text in (
        ("capacityBlockStart", config.capacity_block_start),
        ("capacityBlockEnd", config.capacity_block_end),
    ):
        if text:
            try:
                times[key] = parse_time(text)
            except ValueError:
                return [error(key, f"{text!r} is not a UTC time", "write it like 2027-01-05T11:30:00Z")]
    if len(times) < 2:
        return [
            error(
                "capacityBlockEnd",
                "start and end of the block are not both known: nodes would be paid for and not started, or cut off",
                "copy capacityBlockStart and capacityBlockEnd from the offering",
            )
        ]
    start, end = times["capacityBlockStart"], times["capacityBlockEnd"]
    findings: list[Finding] = []
    if (end.hour, end.minute) != (11, 30):
        findings.append(
            error("capacityBlockEnd", f"ends {end:%H:%M}; blocks end at 11:30 UTC", "copy the offering's end")
        )
    if end <= start:
        findings.append(error("capacityBlockEnd", "the end is not after the start", "copy both from the offering"))
    elif round((end - start) / dt.timedelta(days=1)) not in BLOCK_DAYS:
        findings.append(
            error(
                "capacityBlockEnd", f"a block of {(end - start).days} days is not sold", "1 to 14 days, or weeks to 182"
            )
        )
    if end - BLOCK_LEAD_OUT <= now:
        findings.append(error("capacityBlockEnd", "the block is over", "buy another one, or choose another capacity"))
    if start > now and config.node_count > 0:
        findings.append(
            error(
                "nodeCount",
                f"the block begins at {start:%Y-%m-%d %H:%M} UTC; fixed nodes cannot start before",
                "set nodeCount: 0 and elasticMax to the block's size: they start and stop by schedule",
            )
        )
    return findings
