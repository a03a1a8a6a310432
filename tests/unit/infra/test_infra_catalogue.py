"""The catalogue against the DescribeInstanceTypes snapshot that ships in moto, and the derived interface layouts."""

from __future__ import annotations

import datetime as dt
import gzip
import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from infra.catalogue import efa_layout, instance_type, instance_types, load_prices
from infra.catalogue.interfaces import Interface, efa_count, private_addresses
from infra.catalogue.refresh import EFA_FACTS
from infra.catalogue.types import from_describe, from_record, to_record

moto = pytest.importorskip("moto")

SNAPSHOT = Path(moto.__file__).parent / "ec2" / "resources" / "instance_types.json.gz"
EXPECTED_INTERFACES = {
    "p4d.24xlarge": (5, 4),
    "p4de.24xlarge": (5, 4),
    "p5.4xlarge": (2, 1),
    "p5.48xlarge": (33, 32),
    "p5e.48xlarge": (33, 32),
    "p5en.48xlarge": (17, 16),
    "p6-b200.48xlarge": (9, 8),
    "p6-b300.48xlarge": (17, 16),
    "g6e.48xlarge": (5, 4),
    "g5.48xlarge": (2, 1),
}


@pytest.fixture(scope="module")
def snapshot() -> dict[str, dict]:
    return json.loads(gzip.decompress(SNAPSHOT.read_bytes()))


def test_catalogue_equals_the_api_snapshot(snapshot):
    for name, item in instance_types().items():
        assert item == from_describe(snapshot[name], **EFA_FACTS.get(name, {})), name


def test_every_wanted_family_is_listed():
    families = {item.family for item in instance_types().values()}
    assert {"p4d", "p4de", "p5", "p5e", "p5en", "p6-b200", "p6-b300", "g5", "g6e"} <= families
    assert any(not item.has_gpu for item in instance_types().values())


def test_efa_facts_are_complete_for_efa_types():
    for item in instance_types().values():
        assert (item.efa_max > 0) == (item.efa_generation > 0) == (item.efa_gbps > 0), item.name
    p4d, p5 = instance_type("p4d.24xlarge"), instance_type("p5.48xlarge")
    assert (p4d.rdma_read, p4d.rdma_write) == (True, False)
    assert (p5.rdma_read, p5.rdma_write) == (True, True)


@pytest.mark.parametrize(("name", "counts"), EXPECTED_INTERFACES.items())
def test_interface_counts(name, counts):
    layout = efa_layout(instance_type(name))
    assert (len(layout), efa_count(layout)) == counts
    assert private_addresses(layout) == 1
    assert layout[0] == Interface(0, 0, "interface")


def test_p4d_layout_to_the_letter():
    assert efa_layout(instance_type("p4d.24xlarge")) == (
        Interface(0, 0, "interface"),
        Interface(0, 1, "efa-only"),
        Interface(1, 0, "efa-only"),
        Interface(2, 0, "efa-only"),
        Interface(3, 0, "efa-only"),
    )


def test_p6_b300_has_no_efa_on_card_0():
    layout = efa_layout(instance_type("p6-b300.48xlarge"))
    assert [(i.card, i.device) for i in layout if i.kind == "efa-only"] == [(card, 0) for card in range(1, 17)]


def test_layouts_of_all_efa_types_stay_within_the_api_limits(snapshot):
    efa_types = [from_describe(entry) for entry in snapshot.values() if entry["NetworkInfo"].get("EfaSupported")]
    assert len(efa_types) >= 300
    for item in efa_types:
        layout = efa_layout(item)
        devices = defaultdict(list)
        for interface in layout:
            assert interface.kind in item.cards[interface.card].interface_types, item.name
            devices[interface.card].append(interface.device)
        assert efa_count(layout) == item.efa_max, item.name
        assert len(layout) <= item.max_interfaces, item.name
        assert layout[0].kind != "efa-only" and (layout[0].card, layout[0].device) == (0, 0), item.name
        for card, used in devices.items():
            assert used == sorted(set(used)) and max(used) < item.cards[card].max_interfaces, item.name
            efas = [i for i in layout if i.card == card and i.kind in ("efa", "efa-only")]
            assert len(efas) <= 1, f"{item.name}: several EFA on card {card}"


def test_single_interface_and_no_efa():
    assert efa_layout(instance_type("g5.48xlarge"), single=True) == (Interface(0, 0, "efa"),)
    assert efa_layout(instance_type("p5.48xlarge"), efa=False) == (Interface(0, 0, "interface"),)
    assert efa_layout(instance_type("t3.medium")) == (Interface(0, 0, "interface"),)
    assert efa_layout(instance_type("p6-b300.48xlarge"), single=True) == (Interface(0, 0, "interface"),)


def test_one_slot_on_card_0_falls_back_to_a_combined_interface():
    item = instance_type("p4d.24xlarge")
    narrow = replace(item, cards=(replace(item.cards[0], max_interfaces=1), *item.cards[1:]))
    assert efa_layout(narrow)[0] == Interface(0, 0, "efa")


def test_records_round_trip():
    for item in instance_types().values():
        assert from_record(json.loads(json.dumps(to_record(item)))) == item


def test_prices_cover_the_catalogue_and_are_after_the_cut_of_2025():
    prices = load_prices()
    assert set(prices.instance_usd_per_hour) == set(instance_types())
    assert prices.instance_usd_per_hour["p4d.24xlarge"] < 30, "32.77 was the price before June 2025"
    assert prices.instance_usd_per_hour["p5.48xlarge"] < 90, "98.32 was the price before June 2025"
    assert prices.instance_usd_per_hour["p5e.48xlarge"] is None


def test_old_prices_say_so():
    prices = load_prices()
    assert prices.staleness(prices.date + dt.timedelta(days=prices.stale_after_days)) == ""
    assert "days old" in prices.staleness(prices.date + dt.timedelta(days=prices.stale_after_days + 1))
