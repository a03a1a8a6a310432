"""Which nodes a run starts on: those that were asked for, and spares for those that are to be left alone. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from launch.nodes import Node
from launch.preflight import Facts, Finding, Wanted, judge
from launch.ssh import HostError

Answers = Mapping[str, Facts | HostError]


@dataclass(frozen=True)
class Placement:
    """`nodes` start; `spares` can step in later; `away` are those of the asked ones that are left out, and why."""

    nodes: tuple[Node, ...]
    spares: tuple[Node, ...]
    away: Mapping[str, str]


def place(
    nodes: Sequence[Node],
    spares: Sequence[Node],
    answers: Answers,
    wanted: Wanted,
    *,
    least: int,
    most: int,
    going_on: bool = False,
) -> Placement:
    """Returns where the run starts, on `least` to `most` nodes.

    A drained node is left out when spares or the rest suffice; any other fault is for a person to see, unless the run
    is `going_on`: then it does without what has failed meanwhile. When too few remain nothing is left out, and the
    findings about all of them say why.
    """
    fit = [node for node in nodes if not _faults(node, nodes, answers, wanted)]
    left = [node for node in nodes if node not in fit and (going_on or is_drained(answers[node.name]))]
    base = [node for node in nodes if node not in left]
    # A spare with a fault is no reason not to start.
    able = [node for node in spares if not _faults(node, [*(fit or nodes), node], answers, wanted)]
    chosen = [*base, *able][:most]
    if len(chosen) < least or not chosen:
        return Placement(tuple(nodes), tuple(able), {})
    # A drained node without any other fault can be used once its mark is gone.
    back = [node for node in left if {f.check for f in _faults(node, nodes, answers, wanted)} == {"drained"}]
    steps_in = [node.name for node in chosen if node not in nodes]
    note = f"{', '.join(steps_in)} steps in" if steps_in else "the run does without it"
    rest = tuple(node for node in [*able, *back] if node not in chosen)
    return Placement(tuple(chosen), rest, {node.name: note for node in left})


def excuse(findings: Iterable[Finding], placement: Placement) -> list[Finding]:
    """Returns the findings, those about nodes that are left out as warnings."""
    away = placement.away
    return [
        replace(found, level="warn", message=f"{found.message}; {away[found.node]}")
        if found.level == "fail" and found.node in away
        else found
        for found in findings
    ]


def is_drained(answer: Facts | HostError) -> bool:
    """True when a node has the drain mark."""
    return not isinstance(answer, HostError) and answer["drained"] is not None


def _faults(node: Node, among: Sequence[Node], answers: Answers, wanted: Wanted) -> list[Finding]:
    found = judge({one.name: answers[one.name] for one in among}, wanted)
    return [finding for finding in found if finding.node == node.name and finding.level == "fail"]
