"""The cost of a stack in a plan."""

from __future__ import annotations

import pytest

from launch.cost import stack_cost
from launch.errors import UsageError
from launch.present import print_cost


def test_cost_of_the_example_stack_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    cost = stack_cost("dev")
    assert cost["usd_per_hour"] == pytest.approx(sum(line["usd_per_hour"] for line in cost["lines"]), rel=1e-3)
    print_cost(cost)
    shown = capsys.readouterr().out
    assert "loopworks-dev" in shown
    assert f"{cost['usd_per_hour']:,.2f} USD an hour" in shown


def test_unknown_stack_is_refused_with_what_infra_says() -> None:
    with pytest.raises(UsageError, match="--stack absent"):
        stack_cost("absent")
