"""Where a run starts when nodes are drained or have faults."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from launch.nodes import Node
from launch.placement import Placement, excuse, place
from launch.preflight import Wanted, failed, judge
from launch.ssh import HostError
from tests.unit.launch.test_preflight import VERSIONS, facts

WANTED = Wanted("/runs")
NODES = [Node("a", "a"), Node("b", "b")]
SPARES = [Node("s", "s"), Node("t", "t")]


def placed(least: int = 2, spares: bool = True, going_on: bool = False, **changes: Any) -> Placement:
    answers = {name: facts() for name in "abst"} | changes
    return place(NODES, SPARES if spares else [], answers, WANTED, least=least, most=2, going_on=going_on)


def names(nodes: tuple[Node, ...]) -> str:
    return "".join(node.name for node in nodes)


def test_all_well() -> None:
    where = placed()
    assert (names(where.nodes), names(where.spares), where.away) == ("ab", "st", {})


def test_a_spare_steps_in_for_a_drained_node_which_can_come_back() -> None:
    where = placed(a=facts(drained="upgrade"))
    assert (names(where.nodes), names(where.spares)) == ("bs", "ta")
    assert where.away == {"a": "s steps in"}
    found = excuse(judge({"a": facts(drained="upgrade"), "b": facts()}, WANTED), where)
    assert not failed(found)
    (warning,) = [finding for finding in found if finding.level == "warn"]
    assert warning.message == "it is drained: upgrade; s steps in"


def test_a_drained_node_in_the_middle_of_its_upgrade_does_not_come_back() -> None:
    where = placed(b=facts(drained="upgrade", versions={**VERSIONS, "torch": "3"}))
    assert (names(where.nodes), names(where.spares)) == ("as", "t")


def test_without_a_spare_the_drained_node_is_refused_unless_fewer_are_enough() -> None:
    drained = facts(drained="upgrade")
    where = placed(spares=False, b=drained)
    assert (names(where.nodes), where.away) == ("ab", {})
    assert failed(excuse(judge({"a": facts(), "b": drained}, WANTED), where))
    where = placed(least=1, spares=False, b=drained)
    assert (names(where.nodes), where.away) == ("a", {"b": "the run does without it"})


def test_other_faults_are_for_a_person_to_see_when_a_run_is_started() -> None:
    silent = HostError("b", "timeout", "no answer")
    assert names(placed(b=silent).nodes) == "ab"
    where = placed(b=silent, going_on=True)
    assert (names(where.nodes), names(where.spares), list(where.away)) == ("as", "t", ["b"])


def test_drained_and_faulty_spares_are_left_out() -> None:
    where = placed(s=facts(drained="x"), t=facts(versions={**VERSIONS, "torch": "3"}))
    assert (names(where.nodes), names(where.spares)) == ("ab", "")


@given(st.sets(st.sampled_from("abst")), st.integers(1, 2), st.booleans())
def test_nothing_starts_on_a_drained_node(marked: set[str], least: int, going_on: bool) -> None:
    answers = {name: facts(drained="x" if name in marked else None) for name in "abst"}
    where = place(NODES, SPARES, answers, WANTED, least=least, most=2, going_on=going_on)
    found = judge({node.name: answers[node.name] for node in where.nodes}, WANTED)
    if failed(excuse(found, where)):
        assert len(set("abst") - marked) < least
    else:
        assert not marked & set(names(where.nodes))
        assert least <= len(where.nodes) <= 2
