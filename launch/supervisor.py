"""Watches a run on nodes and heals it: `python -m launch.supervisor RUN`, a process of its own that needs no terminal.

What it knows stands in the run folder (launch/supervision.py). When it dies, the run goes on, and the next supervisor
(`fab attach`) takes over where this one was.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from launch import supervision as sv
from launch.agent import WELL
from launch.backends.ssh import agent_spec, node_specs
from launch.cluster import machine
from launch.errors import LoopworksError, RunFailedError
from launch.lease import lease_s
from launch.plan import DatasetFacts, RunPlan, build_plan
from launch.probe import meeting
from launch.processes import start_time
from launch.remote import NODE_ROOT, ask_agent, call, ensure, shell_path, start_agent
from launch.runs import LIVE
from launch.ssh import HostError, Remote, on_all
from launch.train import disk_is_full, failure, retry_plan, storage_full
from training.config import load_config
from training.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_PREEMPTED
from training.records import RunFolder

log = logging.getLogger("supervisor")

POLL_S = 0.5
# An agent writes each second; a node of which nothing is heard for this long after its lease is lost.
SILENCE_S = 5.0
STARTING_SILENCE_S = 45.0
# Once one node has ended with a fault, the others follow within their lease; this much later they are lost.
FOLLOW_S = 10.0
PROBE_TIMEOUT_S = 6.0
END_TIMEOUT_S = 30.0
STOP_GRACE_S = 120.0
CODE_ARCHIVE = "code.tar.gz"


class Supervisor:
    """Takes a run through its attempts."""

    def __init__(self, run: RunFolder, settings: sv.Settings) -> None:
        self.run, self.settings, self.lease_s = run, settings, lease_s()
        self.watch = sv.Watch(pid=os.getpid(), start=start_time(os.getpid()))
        self.plan: RunPlan | None = None
        self._answers: dict[str, Any] = {}
        known = [*settings.nodes, *settings.spares]
        self.remotes = {item["name"]: Remote(settings.node(item["name"]), settings.ssh_config) for item in known}
        for remote in self.remotes.values():
            remote.connect_timeout_s = PROBE_TIMEOUT_S

    def supervise(self) -> int:
        """Runs to the end and returns the run's exit code, which is also noted in supervision.json."""
        try:
            self._supervise()
        except LoopworksError as error:
            self._give_up(error)
        except OSError as error:
            if not disk_is_full(self.run):
                raise
            self._give_up(storage_full(self.run, error))
        return int(self.watch.code or 0)

    def _give_up(self, error: LoopworksError) -> None:
        self._end_everywhere(list(self.remotes))
        self._conclude(error.exit_code, error.cause, error.remedy)

    def _supervise(self) -> None:
        before = sv.read_watch(self.run)
        adopted = before is not None and before.phase == "running"
        if before is not None and before.phase != "ended":
            self.watch = before.model_copy(update={"pid": self.watch.pid, "start": self.watch.start})
        self._note()
        nodes = self.watch.active or [item["name"] for item in self.settings.nodes]
        while True:
            if not adopted and self._stop_asked():
                return self._close(sv.Decision(kind="stopped", reason="stopped before it had started"))
            decision = None if adopted else self._start(nodes)
            adopted = False
            if decision is None:
                decision = self._decide(*self._wait(self.watch.active))
            log.info("attempt %d: %s %s", self.watch.attempt, decision.kind, decision.reason)
            if decision.kind in ("finished", "stopped", "failed"):
                return self._close(decision)
            nodes = self._next_nodes(decision)

    # -- start ------------------------------------------------------------------------------------------------------

    def _start(self, names: Sequence[str]) -> sv.Decision | None:
        """Sends what is missing, ends what an earlier attempt left, and starts the agents of all nodes.

        Returns what follows when that fails on a node.
        """
        attempt = self.watch.attempt + 1
        self._note(attempt=attempt, active=list(names), phase="preparing")
        if attempt > 1:
            self.plan = self._replan(names)
        plan = self.plan or self._first_plan(names)
        ready = self._on(names, self._prepare)
        if (fault := self._fault_of(ready)) is not None:
            return fault
        place = meeting(self.settings.facts[names[0]], self.settings.port, ready[names[0]]["ports"])
        specs = node_specs(plan, self.settings.facts, place, str(self.run.path), self.settings.code, self.settings.env)
        common = {"run": str(self.run.path), "attempt": attempt, "token": secrets.token_hex(16)}
        common |= {"hang_s": self.settings.hang_s, "lease_s": self.lease_s, "stop_grace_s": STOP_GRACE_S}
        jobs = {
            spec.node: agent_spec(spec, index, names, place, ranks=node.ranks, **common)
            for index, (spec, node) in enumerate(zip(specs, plan.nodes, strict=True))
        }

        def begin(remote: Remote) -> bool:
            spec = jobs[remote.node.name]
            facts = self.settings.facts[remote.node.name]
            start_agent(remote, facts["python"], spec["directory"], self._agent_folder(remote.node.name), spec)
            return True

        if (fault := self._fault_of(self._on(names, begin))) is not None:
            return fault
        if self._stop_asked():
            self._end_everywhere(names)
            return sv.Decision(kind="stopped", reason="stopped while it was started")
        self._note(phase="running")
        self.run.event("nodes", self.run.read_state().step, f"attempt {attempt} on {', '.join(names)}")
        return None

    def _prepare(self, remote: Remote) -> dict[str, Any]:
        """Code and data are there and nothing of the run is running: returns two free ports."""
        settings, facts = self.settings, self.settings.facts[remote.node.name]
        ensure(remote, settings.sources(self.run.path / CODE_ARCHIVE))
        if self.watch.attempt == 1:
            return {"ports": facts["ports"]}
        return self._end(remote)

    def _first_plan(self, names: Sequence[str]) -> RunPlan:
        self.plan = self._replan(names)
        return self.plan

    def _replan(self, names: Sequence[str]) -> RunPlan:
        """Plans for the nodes of this attempt; a micro-batch that was halved for want of memory stays halved."""
        config = load_config(self.run.config)
        before = json.loads(self.run.plan.read_text(encoding="utf-8"))
        dataset = None if self.settings.data is None else DatasetFacts(**self.settings.data)
        plan = build_plan(config, [machine(name, self.settings.facts[name]) for name in names], dataset)
        share = plan.micro_batch * plan.accumulation
        if plan.micro_batch > before["micro_batch"] and share % before["micro_batch"] == 0:
            micro = before["micro_batch"]
            plan = replace(plan, micro_batch=micro, accumulation=share // micro)
        resume = before["resume"] or self.watch.attempt > 1
        self.run.write_plan({**plan.as_json(), "dataset_dir": before["dataset_dir"], "resume": resume})
        return plan

    # -- watch ------------------------------------------------------------------------------------------------------

    def _wait(self, names: Sequence[str]) -> tuple[dict[str, sv.NodeState], list[str]]:
        """Waits until all nodes have ended or are lost; returns what they said, and the lost ones."""
        began = time.monotonic()
        heard: dict[str, tuple[float, float]] = {}
        first_end: float | None = None
        silence_s = self.lease_s + SILENCE_S
        while True:
            states, now = sv.read_nodes(self.run, self.watch.attempt), time.monotonic()
            for name, state in states.items():
                if heard.get(name, (0.0, 0.0))[0] != state.time:
                    heard[name] = (state.time, now)
            ended = [name for name in names if name in states and states[name].phase == "ended"]
            silent = [
                name
                for name in names
                if name not in ended
                and now - heard.get(name, (0.0, began))[1] > (silence_s if name in heard else STARTING_SILENCE_S)
            ]
            first_end = (first_end or now) if ended or silent else None
            if len(ended) + len(silent) == len(names):
                return states, silent
            faults = any(states[name].code not in WELL for name in ended)
            if first_end is not None and now - first_end > self.lease_s + FOLLOW_S and faults:
                return states, [name for name in names if name not in ended]
            time.sleep(POLL_S)

    def _decide(self, states: dict[str, sv.NodeState], silent: Sequence[str]) -> sv.Decision:
        state, errors = self.run.read_state(), self.run.read_errors()
        healthy = self.run.result.is_file() and state.phase == "finished"
        # What is left of the attempt is ended before anything else is decided; who answers can be used again.
        names = self.watch.active if healthy or self._stop_asked() else list(self.remotes)
        self._answers = self._on(names, self._end_if_there)
        lost = [name for name in self.watch.active if isinstance(self._answers.get(name), HostError)]
        if disk_is_full(self.run):
            raise storage_full(self.run)
        if self._stop_asked() and not healthy:
            # Ranks that had not begun to train leave without a word.
            return sv.Decision(kind="stopped", reason=state.message or "stopped before the first step")
        # A node that does not answer is at fault; one that was only silent may have been kept from speaking.
        return sv.judge(state, self.run.result.is_file(), errors, states, lost or list(silent))

    def _next_nodes(self, decision: sv.Decision) -> list[str]:
        """Returns the nodes of the next attempt. Raises RunFailedError when there is to be none."""
        if decision.kind == "smaller":
            smaller = retry_plan(self.plan or self._replan(self.watch.active), self.run.read_errors())
            if smaller is None:
                raise failure(self.run, 1)
            self.run.write_plan({**json.loads(self.run.plan.read_text()), **smaller.as_json()})
        usable = [name for name, answer in self._answers.items() if not isinstance(answer, HostError)]
        states = sv.read_nodes(self.run, self.watch.attempt)
        left = sv.nodes_left(self.watch.left, states, self._drained(usable))
        if decision.kind == "leave":
            return self._go_on_without(decision.reason, usable, left)
        blame = sv.add_blame(self.watch.blame, decision.blame)
        restarts = self.watch.restarts + 1
        if restarts > self.settings.restarts:
            cause = f"{decision.reason}; the budget of {self.settings.restarts} restart(s) is used up"
            raise RunFailedError(cause, self._remedy(), EXIT_FAILED)
        nodes = sv.choose(self.settings, usable, blame, left)
        self._note(blame=blame, left=left, restarts=restarts, message=decision.reason)
        text = f"{decision.reason}; restart {restarts} of {self.settings.restarts} on {', '.join(nodes)}"
        self._announce("restart", text, blame=blame)
        return nodes

    def _go_on_without(self, reason: str, usable: Sequence[str], left: dict[str, str]) -> list[str]:
        """Returns the nodes of the next attempt after all ranks have saved and left, because a node is taken away or
        drained. That is no fault, and costs no restart; when too few nodes remain the run waits to be resumed."""
        try:
            nodes = sv.choose(self.settings, usable, self.watch.blame, left)
        except RunFailedError as error:
            raise RunFailedError(f"saved and left; {error.cause}", error.remedy, EXIT_PREEMPTED) from None
        self._note(left=left, message=reason)
        self._announce("node_left", f"{reason}; going on on {', '.join(nodes)}", left=left)
        return nodes

    def _announce(self, kind: str, text: str, **details: Any) -> None:
        """Notes why there is another attempt, and clears what the last one has left."""
        self.run.event(kind, self.run.read_state().step, text, **details)
        log.warning("%s", text)
        self.run.clear_errors()
        self.run.update_state(phase="starting", message=text)

    def _drained(self, names: Sequence[str]) -> dict[str, str | None]:
        """Returns what the drain mark of each node says, None where there is none; nodes that do not answer are left
        out."""

        def ask(remote: Remote) -> str | None:
            facts = self.settings.facts[remote.node.name]
            return call(remote, facts["python"], "drained", {}, PROBE_TIMEOUT_S)["reason"]  # type: ignore[no-any-return]

        return {name: why for name, why in self._on(names, ask).items() if not isinstance(why, HostError)}

    # -- end --------------------------------------------------------------------------------------------------------

    def _close(self, decision: sv.Decision) -> None:
        if decision.kind == "finished":
            return self._conclude(0, "finished")
        if decision.kind == "stopped":
            if self.run.read_state().phase in LIVE:
                self.run.update_state(phase="stopped", message=decision.reason)
            code = EXIT_INTERRUPTED if self._stop_asked() else EXIT_PREEMPTED
            return self._conclude(code, decision.reason, self._remedy())
        return self._conclude(decision.code, decision.reason, decision.remedy)

    def _conclude(self, code: int, message: str, remedy: str = "") -> None:
        self._note(phase="ended", code=code, message=message, remedy=remedy)
        log.info("ended with %d: %s", code, message)
        if code not in (0, EXIT_INTERRUPTED, EXIT_PREEMPTED):
            with contextlib.suppress(OSError):  # a full disk; the message is in supervision.json or on the screen
                self.run.update_state(phase="failed", message=message.splitlines()[0])
        for remote in self.remotes.values():
            remote.close()

    def _end_everywhere(self, names: Sequence[str]) -> None:
        """Ends what is left of the run on all nodes that answer; the others end it themselves (launch/lease.py)."""
        for name, answer in self._on(names, self._end_if_there).items():
            if isinstance(answer, HostError):
                log.warning("%s", answer.cause)
            elif answer["left"]:
                log.error("%s: processes are still alive: %s", name, answer["left"])

    def _end(self, remote: Remote) -> dict[str, Any]:
        facts = self.settings.facts[remote.node.name]
        code = self.settings.code.replace("~", facts["home"], 1)
        folder = self._agent_folder(remote.node.name)
        return ask_agent(remote, facts["python"], code, "end", folder, str(self.run.path), END_TIMEOUT_S)

    def _end_if_there(self, remote: Remote) -> dict[str, Any]:
        """Ends the run on a node; one that never had the code has nothing of the run."""
        if remote.run(f"[ -d {shell_path(self.settings.code)} ]", timeout_s=PROBE_TIMEOUT_S).code:
            return {"found": 0, "left": [], "ports": []}
        return self._end(remote)

    # -- small things -----------------------------------------------------------------------------------------------

    def _agent_folder(self, name: str) -> str:
        home = self.settings.facts[name]["home"]
        return f"{NODE_ROOT.replace('~', home, 1)}/runs/{self.run.name}/attempt-{self.watch.attempt}"

    def _on(self, names: Sequence[str], action: Any) -> dict[str, Any]:
        return on_all([self.remotes[name] for name in names], action)

    def _fault_of(self, answers: dict[str, Any]) -> sv.Decision | None:
        """A node that fails between preflight and start is blamed like one that fails later."""
        failures = {name: answer for name, answer in answers.items() if isinstance(answer, HostError)}
        if not failures:
            return None
        self._answers = self._on(list(self.remotes), self._end_if_there)
        first = next(iter(failures.values()))
        full = next((error for error in failures.values() if error.kind == "disk_full"), None)
        if full is not None:
            return sv.Decision(kind="failed", reason=full.cause, code=EXIT_CONFIG, remedy=full.remedy)
        return sv.Decision(kind="restart", reason=first.cause, blame=list(failures), remedy=first.remedy)

    def _stop_asked(self) -> bool:
        """True when a person asked this start of the run to stop."""
        started = self.run.read_state().started
        return any(event.kind == "stop_requested" and event.time >= started for event in self.run.read_events())

    def _remedy(self) -> str:
        return f"go on with it by: fab resume --run {self.run.name}"

    def _note(self, **changes: Any) -> None:
        self.watch = self.watch.model_copy(update=changes)
        with contextlib.suppress(OSError):  # a full disk must not end the watch
            sv.write(self.run.path / "supervision.json", self.watch)


def main(arguments: Sequence[str]) -> int:
    """Entry of `python -m launch.supervisor`."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("paramiko").setLevel(logging.CRITICAL)
    run = RunFolder(arguments[0])
    settings = sv.read_settings(run)
    if settings is None:
        raise SystemExit(f"{run.path} has no nodes.json")
    return Supervisor(run, settings).supervise()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
