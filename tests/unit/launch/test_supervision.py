"""What follows from how an attempt ended: all cases of the decision, without a network."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.agent import dead_ranks, hung_rank, left_code
from launch.errors import RunFailedError, UsageError
from launch.lease import FIRST_CONTACT_S, LEASE_S, lease_s, lost_peers
from launch.supervision import (
    BLAME_LIMIT,
    Decision,
    NodeState,
    Settings,
    add_blame,
    choose,
    judge,
    nodes_left,
)
from training.heartbeat import Heartbeat
from training.records import RankError, RunState


def node(name: str, rank: int, code: int | None, reason: str = "", phase: str = "training") -> NodeState:
    beats: list[dict[str, Any]] = [{"rank": rank, "pid": 1, "phase": phase, "step": 3, "time": 1.0}]
    return NodeState(node=name, attempt=1, phase="ended", code=code, reason=reason, time=1.0, ranks=beats)


def error(rank: int, cause: str, **more: Any) -> RankError:
    return RankError(**{"rank": rank, "time": 1.0, "cause": cause, "exit_code": 1, "expected": False, **more})


def decide(
    phase: str = "training", errors: Any = (), nodes: Any = (), lost: Any = (), result: bool = False
) -> Decision:
    state = RunState(name="x", phase=phase, message="said")  # type: ignore[arg-type]
    return judge(state, result, list(errors), {item.node: item for item in nodes}, list(lost))


def test_finished_needs_result_phase_and_all_codes() -> None:
    well = [node("a", 0, 0, phase="ended"), node("b", 1, 0, phase="ended")]
    assert decide("finished", nodes=well, result=True).kind == "finished"
    assert decide("finished", nodes=[well[0], node("b", 1, 1)], result=True).kind == "restart"
    assert decide("training", nodes=well).kind == "restart"


def test_a_run_that_left_is_not_started_again() -> None:
    assert decide("stopped", nodes=[node("a", 0, 1)]).kind == "stopped"


def test_killed_rank_is_blamed_and_not_the_one_that_tells_of_it() -> None:
    echo = error(0, "RuntimeError: Connection closed by peer [10.0.0.2]")
    found = decide(errors=[echo], nodes=[node("a", 0, 1, "torchrun ended"), node("b", 1, 1, "torchrun ended")])
    assert (found.kind, found.blame) == ("restart", ["b"])
    assert "rank 1 on b died" in found.reason


def test_own_error_of_a_rank_is_the_cause() -> None:
    found = decide(errors=[error(1, "ValueError: x")], nodes=[node("a", 0, 1), node("b", 1, 1)])
    assert (found.reason, found.blame) == ("rank 1: ValueError: x", ["b"])


def test_lost_nodes_come_before_everything_that_others_say() -> None:
    found = decide(errors=[error(0, "Connection reset")], nodes=[node("a", 0, 1)], lost=["b"])
    assert (found.reason, found.blame) == ("lost b", ["b"])


def test_hang_blames_the_node_of_the_rank() -> None:
    reason = "hang: rank 1 gave no sign of life for 9 s (training, step 3)"
    found = decide(nodes=[node("a", 0, 1, reason), node("b", 1, 1, reason)])
    assert (found.reason, found.blame) == (reason, ["b"])


def test_what_the_user_must_mend_and_what_memory_needs() -> None:
    full = error(0, "cannot write x: No space left", exit_code=2, expected=True, remedy="free space")
    found = decide(errors=[full], nodes=[node("a", 0, 1)])
    assert (found.kind, found.code, found.remedy) == ("failed", 2, "free space")
    short = error(0, "out of memory", kind="out_of_memory", expected=True)
    assert decide(errors=[short], nodes=[node("a", 0, 1)]).kind == "smaller"


def settings(nodes: int, spares: int, least: int) -> Settings:
    made = [
        [{"name": f"{kind}{i}", "host": "h"} for i in range(count)] for kind, count in (("n", nodes), ("s", spares))
    ]
    return Settings(
        nodes=made[0],
        spares=made[1],
        facts={},
        min_nodes=least,
        most_nodes=nodes,
        restarts=3,
        hang_s=300,
        code="~/.loopworks/code/x",
    )


def test_spares_step_in_and_a_node_blamed_twice_is_left_out() -> None:
    some = settings(2, 1, 2)
    assert choose(some, ["n0", "n1", "s0"], {"n1": 1}) == ["n0", "n1"]
    assert choose(some, ["n0", "n1", "s0"], {"n1": BLAME_LIMIT}) == ["n0", "s0"]
    assert choose(some, ["n1", "s0"], {}) == ["n1", "s0"]
    with pytest.raises(RunFailedError, match="1 node.s. are left, 2 are needed; no answer from n1, s0") as caught:
        choose(some, ["n0"], {})
    assert caught.value.exit_code == 4
    with pytest.raises(RunFailedError, match="left out after 2 faults: n1"):
        choose(settings(2, 0, 2), ["n0", "n1"], {"n1": 2})


def leaving(name: str, rank: int, why: str) -> NodeState:
    beats: list[dict[str, Any]] = [{"rank": rank, "pid": 1, "phase": "ended", "step": 3, "time": 1.0, "leaving": why}]
    return NodeState(node=name, attempt=1, phase="ended", code=75, time=1.0, ranks=beats)


def test_a_node_that_leaves_is_told_from_a_run_that_was_asked_to() -> None:
    assert decide("stopped", nodes=[node("a", 0, 75), node("b", 1, 75)]).kind == "stopped"
    found = decide("stopped", nodes=[node("a", 0, 75), leaving("b", 1, "spot terminate at 12:00")])
    assert (found.kind, found.reason, found.blame) == ("leave", "b: spot terminate at 12:00", [])
    shutting = NodeState(node="b", attempt=1, phase="ended", code=75, time=1.0, leaving="asked to end")
    assert decide("stopped", nodes=[node("a", 0, 75), shutting]).kind == "leave"
    killed = shutting.model_copy(update={"code": 1})
    assert decide("stopped", nodes=[node("a", 0, 75), killed]).kind == "stopped"
    assert nodes_left({}, {"b": killed}, {}) == {}
    # A rank that dies during the save is a fault all the same.
    assert decide(nodes=[node("a", 0, 1), leaving("b", 1, "drained: x")]).kind == "restart"


def test_left_nodes_stay_out_until_their_mark_is_gone() -> None:
    states = {"a": node("a", 0, 75), "b": leaving("b", 1, "drained: x")}
    left = nodes_left({}, states, {"a": None, "b": "x", "s": "y"})
    assert left == {"b": "drained: x", "s": "drained: y"}
    assert nodes_left(left, {}, {"a": None, "b": None, "s": "y"}) == {"s": "drained: y"}
    assert nodes_left(left, {}, {"a": None}) == left, "one that does not answer is not back"
    gone = {"b": "spot terminate at 12:00"}
    assert nodes_left(gone, {}, {"a": None, "b": None}) == gone, "what the cloud takes does not come back"
    assert nodes_left({}, states, {"a": None, "b": None}) == {"b": "drained: x"}


def test_a_left_node_is_replaced_or_named() -> None:
    some = settings(2, 1, 2)
    assert choose(some, ["n0", "n1", "s0"], {}, {"n1": "drained: x"}) == ["n0", "s0"]
    with pytest.raises(
        RunFailedError, match=r"1 node.s. are left, 2 are needed; no answer from s0; n1 is left \(drain"
    ):
        choose(some, ["n0", "n1"], {}, {"n1": "drained: x"})


@given(st.sets(st.integers(0, 5)), st.dictionaries(st.sampled_from(["n0", "n1", "n2", "s0"]), st.integers(0, 3)))
def test_chosen_nodes_answer_are_not_blamed_and_are_never_too_many(up: set[int], blame: dict[str, int]) -> None:
    some = settings(3, 3, 1)
    usable = [name for i, name in enumerate(["n0", "n1", "n2", "s0", "s1", "s2"]) if i in up]
    try:
        chosen = choose(some, usable, blame)
    except RunFailedError:
        assert all(blame.get(name, 0) >= BLAME_LIMIT for name in usable)
        return
    assert 1 <= len(chosen) <= 3
    assert set(chosen) <= set(usable)
    assert all(blame.get(name, 0) < BLAME_LIMIT for name in chosen)


def test_blame_adds_up() -> None:
    assert add_blame({"a": 1}, ["a", "b"]) == {"a": 2, "b": 1}


def beat(rank: int, phase: str, time: float, step_s: float = 0.1) -> Heartbeat:
    return Heartbeat(rank=rank, pid=100 + rank, phase=phase, step=1, time=time, step_s=step_s)  # type: ignore[arg-type]


def test_hang_is_silence_longer_than_the_phase_may_take() -> None:
    assert not hung_rank([beat(0, "training", 0)], 300, now=299)
    assert hung_rank([beat(0, "training", 50), beat(1, "training", 0)], 300, now=301).startswith("hang: rank 1")
    assert not hung_rank([beat(0, "training", 0, step_s=60)], 300, now=599), "a step that takes long is no hang"
    assert not hung_rank([beat(0, "starting", 0)], 5, now=600)
    assert not hung_rank([beat(0, "ended", 0)], 5, now=1e6)


def test_ranks_that_have_all_left_have_a_code_of_their_own() -> None:
    ended = [beat(i, "ended", 0).model_copy(update={"code": 75}) for i in range(2)]
    assert left_code(ended, 2) == 75
    assert left_code(ended, 3) is None
    assert left_code([ended[0], beat(1, "closing", 0)], 2) is None
    assert left_code([], 1) is None


def test_a_rank_that_ended_is_not_dead() -> None:
    beats = [beat(0, "ended", 0), beat(1, "training", 0), beat(2, "training", 0)]
    assert dead_ranks(beats, {102: True}) == [1]


def test_first_contact_may_take_longer_than_the_lease() -> None:
    assert not lost_peers({}, ["a"], began=0, now=FIRST_CONTACT_S)
    assert lost_peers({}, ["a"], began=0, now=FIRST_CONTACT_S + 1) == ["a"]
    assert lost_peers({"a": 100.0}, ["a", "b"], began=90, now=100 + LEASE_S + 1) == ["a"]
    assert lost_peers({"a": 100.0}, ["a"], began=90, now=100 + LEASE_S + 1, lease=60) == []


def test_length_of_the_lease() -> None:
    assert lease_s({}) == LEASE_S
    assert lease_s({"LOOPWORKS_LEASE_S": "6"}) == 6
    for text in ("1", "x", "nan", "1e9"):
        with pytest.raises(UsageError, match="LOOPWORKS_LEASE_S"):
            lease_s({"LOOPWORKS_LEASE_S": text})
