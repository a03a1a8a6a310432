"""Instance types as the EC2 API describes them, reduced to what a cluster needs.

`from_describe` reads one entry of DescribeInstanceTypes, so the data file can be made again from the API
(`python -m infra.catalogue.refresh`) and compared with it in tests.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

DATA_FILE = Path(__file__).parent / "instance_types.json"


@dataclass(frozen=True)
class NetworkCard:
    """One network card: which interface types it takes, how many interfaces, its line rate."""

    index: int
    interface_types: tuple[str, ...]
    max_interfaces: int
    gbps: float


@dataclass(frozen=True)
class InstanceType:
    """Facts of one instance type. Memory in MiB, disks in GB (10^9), rates in Gbit/s or Mbit/s as named.

    `efa_generation`, `rdma_read`, `rdma_write` and `efa_gbps` are not in the API: they come from AWS's page of
    EFA instance types and are 0/False for types without EFA. `efa_gbps` is the total over all interfaces.
    """

    name: str
    vcpus: int
    memory_mib: int
    architecture: str
    gpu_name: str
    gpu_count: int
    gpu_memory_mib: int
    cards: tuple[NetworkCard, ...]
    max_interfaces: int
    efa_max: int
    nvme_count: int
    nvme_gb: int
    ebs_mbps: int
    boot_modes: tuple[str, ...]
    usage_classes: tuple[str, ...]
    cluster_placement: bool
    efa_generation: int = 0
    efa_gbps: int = 0
    rdma_read: bool = False
    rdma_write: bool = False

    @property
    def family(self) -> str:
        """The part before the dot: `p5en` of `p5en.48xlarge`."""
        return self.name.split(".", maxsplit=1)[0]

    @property
    def has_gpu(self) -> bool:
        """Whether the type carries GPUs."""
        return self.gpu_count > 0


def from_describe(entry: dict[str, Any], **efa_facts: Any) -> InstanceType:
    """One DescribeInstanceTypes entry as an InstanceType; `efa_facts` are the fields that the API does not tell."""
    network = entry["NetworkInfo"]
    gpus = entry.get("GpuInfo", {}).get("Gpus", [])
    disks = entry.get("InstanceStorageInfo", {}).get("Disks", [])
    ebs = entry.get("EbsInfo", {}).get("EbsOptimizedInfo", {})
    cards = tuple(
        NetworkCard(
            index=card["NetworkCardIndex"],
            interface_types=tuple(sorted(card.get("InterfaceTypes", ["interface"]))),
            max_interfaces=card["MaximumNetworkInterfaces"],
            gbps=card.get("PeakBandwidthInGbps", 0.0),
        )
        for card in network.get("NetworkCards", [])
    )
    return InstanceType(
        name=entry["InstanceType"],
        vcpus=entry["VCpuInfo"]["DefaultVCpus"],
        memory_mib=entry["MemoryInfo"]["SizeInMiB"],
        architecture=entry["ProcessorInfo"]["SupportedArchitectures"][-1],
        gpu_name=gpus[0]["Name"] if gpus else "",
        gpu_count=sum(gpu["Count"] for gpu in gpus),
        gpu_memory_mib=gpus[0]["MemoryInfo"]["SizeInMiB"] if gpus else 0,
        cards=cards,
        max_interfaces=network["MaximumNetworkInterfaces"],
        efa_max=network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 0),
        nvme_count=sum(disk["Count"] for disk in disks),
        nvme_gb=disks[0]["SizeInGB"] if disks else 0,
        ebs_mbps=ebs.get("MaximumBandwidthInMbps", 0),
        boot_modes=tuple(sorted(entry.get("SupportedBootModes", []))),
        usage_classes=tuple(sorted(entry.get("SupportedUsageClasses", []))),
        cluster_placement="cluster" in entry.get("PlacementGroupInfo", {}).get("SupportedStrategies", []),
        **efa_facts,
    )


def to_record(item: InstanceType) -> dict[str, Any]:
    """The type as stored in the data file: equal neighbouring cards are one run with a count."""
    record = asdict(item)
    runs: list[dict[str, Any]] = []
    for card in item.cards:
        shape = {
            "interface_types": list(card.interface_types),
            "max_interfaces": card.max_interfaces,
            "gbps": card.gbps,
        }
        if runs and {key: runs[-1][key] for key in shape} == shape:
            runs[-1]["count"] += 1
        else:
            runs.append({"count": 1, **shape})
    record["cards"] = runs
    return record


def from_record(record: dict[str, Any]) -> InstanceType:
    """Inverse of `to_record`."""
    cards: list[NetworkCard] = []
    for run in record["cards"]:
        for _ in range(run["count"]):
            cards.append(NetworkCard(len(cards), tuple(run["interface_types"]), run["max_interfaces"], run["gbps"]))
    lists = {key: tuple(record[key]) for key in ("boot_modes", "usage_classes")}
    return InstanceType(**{**record, **lists, "cards": tuple(cards)})


@cache
def instance_types() -> dict[str, InstanceType]:
    """Every type of the catalogue by name."""
    document = json.loads(DATA_FILE.read_text(encoding="utf-8"))
    return {record["name"]: from_record(record) for record in document["types"]}


def instance_type(name: str) -> InstanceType:
    """One type of the catalogue. Raises KeyError where it is not listed; validation reports that before."""
    return instance_types()[name]
