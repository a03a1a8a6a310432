"""Make instance_types.json again from the EC2 API's own answer.

    aws ec2 describe-instance-types --instance-types ... --output json > describe.json
    python -m infra.catalogue.refresh describe.json --source "AWS CLI" --date 2026-11-30

Reads the facts that the API does not tell (EFA generation, RDMA) from EFA_FACTS below.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from infra.catalogue.types import DATA_FILE, from_describe, to_record

# AWS EC2 guide, "EFA": generation, RDMA read, RDMA write; total EFA rate from "EFA and accelerated instance types".
EFA_FACTS: dict[str, dict[str, Any]] = {
    "p4d.24xlarge": {"efa_generation": 1, "efa_gbps": 400, "rdma_read": True, "rdma_write": False},
    "p4de.24xlarge": {"efa_generation": 1, "efa_gbps": 400, "rdma_read": True, "rdma_write": False},
    "p5.4xlarge": {"efa_generation": 2, "efa_gbps": 100, "rdma_read": True, "rdma_write": True},
    "p5.48xlarge": {"efa_generation": 2, "efa_gbps": 3200, "rdma_read": True, "rdma_write": True},
    "p5e.48xlarge": {"efa_generation": 2, "efa_gbps": 3200, "rdma_read": True, "rdma_write": True},
    "p5en.48xlarge": {"efa_generation": 3, "efa_gbps": 3200, "rdma_read": True, "rdma_write": True},
    "p6-b200.48xlarge": {"efa_generation": 4, "efa_gbps": 3200, "rdma_read": True, "rdma_write": True},
    "p6-b300.48xlarge": {"efa_generation": 4, "efa_gbps": 6400, "rdma_read": True, "rdma_write": True},
    "g5.48xlarge": {"efa_generation": 1, "efa_gbps": 100},
    "g6e.48xlarge": {"efa_generation": 2, "efa_gbps": 400, "rdma_read": True, "rdma_write": True},
}
PLAIN_TYPES = ("g5.xlarge", "g6e.xlarge", "t3.medium", "c7i.large", "m7i.large", "m7i.xlarge", "m7i.2xlarge")
TYPES = (*EFA_FACTS, *PLAIN_TYPES)


def build(entries: list[dict[str, Any]], *, source: str, date: str) -> dict[str, Any]:
    """The data file's content from DescribeInstanceTypes entries; types missing from them raise KeyError."""
    by_name = {entry["InstanceType"]: entry for entry in entries}
    records = [to_record(from_describe(by_name[name], **EFA_FACTS.get(name, {}))) for name in TYPES]
    return {"date": date, "source": source, "types": records}


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("describe", type=Path, help="JSON answer of describe-instance-types")
    parser.add_argument("--source", required=True)
    parser.add_argument("--date", required=True)
    arguments = parser.parse_args()
    entries = json.loads(arguments.describe.read_text(encoding="utf-8"))["InstanceTypes"]
    document = build(entries, source=arguments.source, date=arguments.date)
    DATA_FILE.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"{DATA_FILE.name}: {len(document['types'])} types of {arguments.date}")


if __name__ == "__main__":
    main()
