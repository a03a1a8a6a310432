"""What follows from how an attempt ended: all cases of the decision, without a network."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.agent import dead_ranks, hung_rank
from launch.errors import RunFailedError
from launch.lease import FIRST_CONTACT_S, LEASE_S, lost_peers
from launch.supervision import BLAME_LIMIT, Decision, NodeState, Settings, Watch, add_blame, choose, describe, judge
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
        nodes=made[0], spares=made[1], facts={}, min_nodes=least, restarts=3, hang_s=300, code="~/.loopworks/code/x"
    )


def test_spares_step_in_and_a_node_blamed_twice_is_left_out() -> None:
    some = settings(2, 1, 2)
    assert choose(some, ["n0", "n1", "s0"], {"n1": 1}, keep=2) == ["n0", "n1"]
    assert choose(some, ["n0", "n1", "s0"], {"n1": BLAME_LIMIT}, keep=2) == ["n0", "s0"]
    assert choose(some, ["n1", "s0"], {}, keep=2) == ["n1", "s0"]
    with pytest.raises(RunFailedError, match="1 node.s. are left, 2 are needed; no answer from n1, s0") as caught:
        choose(some, ["n0"], {}, keep=2)
    assert caught.value.exit_code == 4
    with pytest.raises(RunFailedError, match="left out after 2 faults: n1"):
        choose(settings(2, 0, 2), ["n0", "n1"], {"n1": 2}, keep=2)


@given(st.sets(st.integers(0, 5)), st.dictionaries(st.sampled_from(["n0", "n1", "n2", "s0"]), st.integers(0, 3)))
def test_chosen_nodes_answer_are_not_blamed_and_are_never_too_many(up: set[int], blame: dict[str, int]) -> None:
    some = settings(3, 3, 1)
    usable = [name for i, name in enumerate(["n0", "n1", "n2", "s0", "s1", "s2"]) if i in up]
    try:
        chosen = choose(some, usable, blame, keep=3)
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


def test_a_rank_that_ended_is_not_dead() -> None:
    beats = [beat(0, "ended", 0), beat(1, "training", 0), beat(2, "training", 0)]
    assert dead_ranks(beats, {102: True}) == [1]


def test_first_contact_may_take_longer_than_the_lease() -> None:
    assert not lost_peers({}, ["a"], began=0, now=FIRST_CONTACT_S)
    assert lost_peers({}, ["a"], began=0, now=FIRST_CONTACT_S + 1) == ["a"]
    assert lost_peers({"a": 100.0}, ["a", "b"], began=90, now=100 + LEASE_S + 1) == ["a"]


def test_one_line_says_how_the_run_is() -> None:
    watch = Watch(pid=1, start=1.0, active=["a", "b"], restarts=1)
    text = describe(watch, {"a": node("a", 0, None)}, 90.0, now=101.0)
    assert text == "a step 3, silent for 100 s | b starting | checkpoint 11 s ago | 1 restart(s)"
    assert "no checkpoint yet" in describe(watch, {}, None, now=0.0)
