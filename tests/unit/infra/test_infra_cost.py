"""The estimate adds up, names what it leaves out, and is readable by programs."""

from __future__ import annotations

import datetime as dt
import json
import subprocess
import sys

import pytest

from infra.catalogue import load_prices
from infra.config import ClusterConfig, parse
from infra.cost import HOURS_PER_MONTH, estimate, main, summary, table
from tests.infra_engine.stacks import ROOT

TODAY = dt.date(2026, 11, 30)


def test_two_p4d_by_hand():
    config = parse({"nodeCount": 2, "headInstanceType": "t3.medium", "natGateway": True, "flowLogs": False,
                    "sharedStorage": "none", "rootVolumeGib": 100, "headVolumeGib": 100})  # fmt: skip
    gp3 = 0.08 * 300 / HOURS_PER_MONTH
    bucket = 0.023 * 1000 / HOURS_PER_MONTH
    by_hand = 2 * 21.957642 + 0.0416 + gp3 + bucket + 0.045 + 2 * 0.005
    result = estimate(config, today=TODAY)
    assert result.usd_per_hour == pytest.approx(by_hand)
    assert result.usd_per_month == pytest.approx(by_hand * 730)
    assert result.idle_usd_per_hour == pytest.approx(by_hand - 2 * 21.957642 - 0.08 * 200 / HOURS_PER_MONTH)


def test_lustre_price_follows_capacity_and_throughput():
    def rate(**changes):
        lines = estimate(ClusterConfig(**changes), today=TODAY).lines
        return next(line.usd_per_hour for line in lines if line.resource.startswith("FSx"))

    assert rate(fsx_capacity_gib=4800, fsx_throughput=250) == pytest.approx(4800 * 0.21 / 730)
    assert rate(fsx_deployment="SCRATCH_2", fsx_throughput=0) == pytest.approx(1200 * 0.14 / 730)


def test_what_has_no_price_is_named_and_left_out():
    config = parse({"instanceType": "p5e.48xlarge", "capacity": "capacity-block"})
    result = estimate(config, today=TODAY)
    assert any("no list price for GPU nodes p5e.48xlarge" in warning for warning in result.warnings)
    assert "?" in table(result)


def test_warnings_for_budget_region_and_old_prices():
    config = parse({"monthlyBudgetUsd": 100, "region": "eu-west-1"})
    late = load_prices().date + dt.timedelta(days=400)
    text = summary(estimate(config, today=late))
    assert "the budget is 100 USD" in text and "eu-west-1 differs" in text and "days old" in text


def test_dev_stack_costs_cents():
    from infra.config import load_stack_file

    result = estimate(load_stack_file(ROOT / "infra" / "Pulumi.dev.yaml"), today=TODAY)
    assert 0 < result.usd_per_hour < 0.5
    assert result.warnings == ()


def test_json_from_the_command_line():
    command = [sys.executable, "-m", "infra.cost", "prod", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=30)
    document = json.loads(done.stdout)
    assert document["usd_per_hour"] == pytest.approx(sum(line["usd_per_hour"] for line in document["lines"]), abs=1e-3)
    assert document["currency"] == "USD" and document["cluster"] == "loopworks"


def test_cost_needs_no_pulumi():
    code = "import sys, infra.cost; assert not [m for m in sys.modules if m.startswith(('pulumi', 'boto', 'torch'))]"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=30)


def test_a_missing_stack_is_named(capsys):
    assert main(["nowhere"]) == 2
    assert "Pulumi.nowhere.yaml" in capsys.readouterr().err
