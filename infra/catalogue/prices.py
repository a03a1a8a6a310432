"""List prices as a dated file. A price is a quotation from its date: `staleness` says when to look again."""

from __future__ import annotations

import datetime as dt
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

DATA_FILE = Path(__file__).parent / "prices.json"
HOURS_PER_MONTH = 730


@dataclass(frozen=True)
class Prices:
    """The price file. Rates are USD; None where AWS publishes no on-demand price."""

    date: dt.date
    region: str
    source: str
    stale_after_days: int
    instance_usd_per_hour: dict[str, float | None]
    rates: dict[str, Any]

    def fsx_usd_per_gib_month(self, deployment: str, throughput: int) -> float | None:
        """FSx for Lustre SSD storage; None where the combination is not listed."""
        table = self.rates["fsx_lustre_usd_per_gib_month"].get(deployment, {})
        rate = table.get(str(throughput), table.get("0"))
        return None if rate is None else float(rate)

    def staleness(self, today: dt.date) -> str:
        """A sentence when the file is older than it should be, else an empty string."""
        age = (today - self.date).days
        if age <= self.stale_after_days:
            return ""
        return f"the price file is {age} days old (of {self.date}); look up current prices before you decide on money"


@cache
def load_prices(path: Path = DATA_FILE) -> Prices:
    """Read the price file."""
    document = json.loads(path.read_text(encoding="utf-8"))
    return Prices(
        date=dt.date.fromisoformat(document["date"]),
        region=document["region"],
        source=document["source"],
        stale_after_days=document["stale_after_days"],
        instance_usd_per_hour=document["instance_usd_per_hour"],
        rates=document,
    )
