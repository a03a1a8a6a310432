"""What the cluster costs by the hour and by the month, from the dated price file, before anything is built.

    python -m infra.cost prod            a table
    python -m infra.cost prod --json     for programs (`fab plan` shows it)

List prices of one region, on demand; spot, blocks, savings plans and traffic are named where they matter.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from infra.catalogue import Prices, load_prices
from infra.catalogue.prices import HOURS_PER_MONTH
from infra.check import stack_path
from infra.config import ClusterConfig, load_stack_file
from infra.findings import EXIT_OK, InfraError

BUCKET_GB = 1000  # an assumption, said in the note: nobody knows yet how much will be written
LOGS_GB_PER_MONTH = 10


@dataclass(frozen=True)
class Line:
    """One resource: how many units, what one costs an hour in USD (None: no list price), a note."""

    resource: str
    quantity: float
    unit_usd_per_hour: float | None
    note: str = ""

    @property
    def usd_per_hour(self) -> float | None:
        """Cost of all units by the hour."""
        return None if self.unit_usd_per_hour is None else self.quantity * self.unit_usd_per_hour


@dataclass(frozen=True)
class Estimate:
    """All lines. Totals leave out lines without a price, and `warnings` names them."""

    cluster: str
    lines: tuple[Line, ...]
    warnings: tuple[str, ...]
    budget_usd: int

    @property
    def usd_per_hour(self) -> float:
        """Total by the hour, everything on."""
        return sum(line.usd_per_hour or 0.0 for line in self.lines)

    @property
    def usd_per_month(self) -> float:
        """Total of 730 hours."""
        return self.usd_per_hour * HOURS_PER_MONTH

    @property
    def idle_usd_per_hour(self) -> float:
        """What is paid while no GPU node runs."""
        return sum(line.usd_per_hour or 0.0 for line in self.lines if not line.resource.startswith("GPU"))

    def as_dict(self) -> dict[str, Any]:
        """The estimate as a JSON object."""
        lines = [{**asdict(line), "usd_per_hour": line.usd_per_hour} for line in self.lines]
        return {
            "cluster": self.cluster,
            "currency": "USD",
            "usd_per_hour": round(self.usd_per_hour, 4),
            "idle_usd_per_hour": round(self.idle_usd_per_hour, 4),
            "usd_per_month": round(self.usd_per_month, 2),
            "budget_usd": self.budget_usd,
            "lines": lines,
            "warnings": list(self.warnings),
        }


def _month(rate: float | None) -> float | None:
    return None if rate is None else rate / HOURS_PER_MONTH


def _instances(config: ClusterConfig, prices: Prices) -> Iterator[Line]:
    def rate(name: str) -> float | None:
        return prices.instance_usd_per_hour.get(name)

    notes = {"spot": "list price; spot is usually far below", "capacity-block": "paid up front at the block's price"}
    note = notes.get(config.capacity, "")
    if config.node_count:
        yield Line(f"GPU nodes {config.instance_type}", config.node_count, rate(config.instance_type), note)
    if config.elastic_max:
        full = "only while they run; shown at the upper limit"
        yield Line(f"GPU nodes, elastic {config.elastic_type}", config.elastic_max, rate(config.elastic_type), full)
    yield Line(f"head {config.head_instance_type}", 1, rate(config.head_instance_type))


def _disks(config: ClusterConfig, prices: Prices) -> Iterator[Line]:
    gp3 = _month(prices.rates["ebs_gp3_usd_per_gib_month"])
    nodes = config.max_nodes * config.root_volume_gib
    if nodes:
        yield Line("GPU nodes' root disks gp3, GiB", nodes, gp3)
    extra = config.nfs_volume_gib if config.shared_storage == "nfs" else 0
    yield Line("head disks gp3, GiB", config.head_volume_gib + extra, gp3)


def _storage(config: ClusterConfig, prices: Prices) -> Iterator[Line]:
    if config.shared_storage == "fsx-lustre":
        rate = prices.fsx_usd_per_gib_month(config.fsx_deployment, config.fsx_throughput)
        note = "without provisioned metadata IOPS" if config.fsx_metadata_iops else ""
        yield Line(f"FSx for Lustre {config.fsx_deployment}, GiB", config.fsx_capacity_gib, _month(rate), note)
    if config.shared_storage == "efs":
        rate = _month(prices.rates["efs_standard_usd_per_gb_month"])
        yield Line("EFS, GB", BUCKET_GB, rate, f"assumes {BUCKET_GB} GB; billed by use")
    rate = _month(prices.rates["s3_standard_usd_per_gb_month"])
    yield Line("checkpoint bucket, GB", BUCKET_GB, rate, f"assumes {BUCKET_GB} GB; billed by use")


def _network(config: ClusterConfig, prices: Prices) -> Iterator[Line]:
    rates = prices.rates
    nat = config.nat_gateway and not config.gpu_public_ip
    if nat:
        note = f"and {rates['nat_usd_per_gb']} USD per GB; S3 does not pass here"
        yield Line("NAT gateway", 1, rates["nat_gateway_usd_per_hour"], note)
    public = int(nat) + int(config.head_public_ip) + (config.max_nodes if config.gpu_public_ip else 0)
    if public:
        yield Line("public IPv4 addresses", public, rates["public_ipv4_usd_per_hour"])
    if config.interface_endpoints:
        yield Line("interface endpoints", len(config.interface_endpoints), rates["interface_endpoint_usd_per_hour"])
    if config.flow_logs:
        rate = _month(rates["logs_usd_per_gb"])
        yield Line("flow logs, GB a month", LOGS_GB_PER_MONTH, rate, "assumed; billed by use")
    if config.alert_emails:
        yield Line("KMS key of the alerts", 1, _month(rates["kms_key_usd_per_month"]))


def estimate(config: ClusterConfig, *, today: dt.date, prices: Prices | None = None) -> Estimate:
    """The estimate of a configuration. Warnings: stale prices, another region, unknown prices, budget too small."""
    prices = prices or load_prices()
    parts = (_instances, _disks, _storage, _network)
    lines = tuple(line for part in parts for line in part(config, prices))
    warnings = [prices.staleness(today)] if prices.staleness(today) else []
    if config.region != prices.region:
        warnings.append(f"prices are of {prices.region}; {config.region} differs")
    warnings += [f"no list price for {line.resource}" for line in lines if line.usd_per_hour is None]
    result = Estimate(config.name, lines, (), config.monthly_budget_usd)
    if 0 < config.monthly_budget_usd < result.usd_per_month:
        warnings.append(
            f"a full month costs about {result.usd_per_month:,.0f} USD, the budget is {config.monthly_budget_usd:,} USD"
        )
    return Estimate(config.name, lines, tuple(warnings), config.monthly_budget_usd)


def summary(result: Estimate) -> str:
    """One paragraph: total, idle cost, warnings."""
    text = (
        f"estimated cost of {result.cluster}: {result.usd_per_hour:,.2f} USD an hour, "
        f"{result.usd_per_month:,.0f} USD for a full month; "
        f"{result.idle_usd_per_hour:,.2f} USD an hour without GPU nodes"
    )
    return "\n".join([text, *(f"  note: {warning}" for warning in result.warnings)])


def table(result: Estimate) -> str:
    """The estimate for people."""
    rows = [f"{'resource':<44} {'quantity':>9} {'USD/h':>10} {'USD/month':>12}  note"]
    for line in result.lines:
        hour = line.usd_per_hour
        money = ("?", "?") if hour is None else (f"{hour:,.3f}", f"{hour * HOURS_PER_MONTH:,.2f}")
        rows.append(f"{line.resource:<44} {line.quantity:>9,.0f} {money[0]:>10} {money[1]:>12}  {line.note}".rstrip())
    return "\n".join([*rows, "", summary(result)])


def main(argv: list[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m infra.cost", description="Estimate what a stack costs")
    parser.add_argument("stack", help="stack name (dev, prod) or path of a Pulumi.STACK.yaml")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    try:
        result = estimate(load_stack_file(stack_path(arguments.stack)), today=dt.date.today())
    except InfraError as fault:
        print(fault, file=sys.stderr)
        return fault.exit_code
    print(json.dumps(result.as_dict(), indent=2) if arguments.json else table(result))
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
