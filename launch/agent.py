"""A node's part of a run: `python -m launch.agent run|stop|end FOLDER`, started over SSH. Imports no torch.

`run` starts torchrun in a process group of its own, watches its ranks and the other nodes, and leaves state and logs
in FOLDER (on the node's own disk) and RUN/nodes/NODE.json (in the run folder, which all nodes share). It needs nobody
who watches it: the session that started it may drop.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from launch.lease import BEAT_S, FIRST_CONTACT_S, Head, Member, lost_peers
from launch.node_facts import free_ports
from launch.processes import end_processes_of, is_running, processes_of
from training.errors import EXIT_OK, EXIT_PREEMPTED
from training.heartbeat import HEARTBEATS_VARIABLE, Heartbeat, read_heartbeats

POLL_S = 0.2
# Codes with which ranks end as they should: finished, or saved and left.
WELL = (EXIT_OK, EXIT_PREEMPTED)
# torchrun and the other ranks need a moment to say why they end; after that they are ended.
DEATH_GRACE_S = 5.0
DUMP_WAIT_S = 1.0
# Exists once fab has asked this node's part of the run to end.
ASKED = "asked-to-end"
# torchrun waits minutes for its peers after the ranks have left, also when it cannot reach them any more.
LEFT_GRACE_S = 15.0
STARTING_LIMIT_S = 900.0
CLOSING_LIMIT_S = 1800.0


def hung_rank(beats: Sequence[Heartbeat], hang_s: float, now: float) -> str:
    """Says which rank has given no sign of life for longer than its phase may take; empty when all are well."""
    limits = {"starting": STARTING_LIMIT_S, "closing": CLOSING_LIMIT_S}
    for beat in sorted(beats, key=lambda beat: beat.time):
        # A step that takes long is no hang.
        limit = limits.get(beat.phase, max(hang_s, 10 * beat.step_s))
        if beat.phase != "ended" and now - beat.time > limit:
            silence = f"no sign of life for {now - beat.time:.0f} s ({beat.phase}, step {beat.step})"
            return f"hang: rank {beat.rank} gave {silence}"
    return ""


def dead_ranks(beats: Sequence[Heartbeat], alive: Mapping[int, bool]) -> list[int]:
    """Returns the ranks whose process is gone although they had not ended."""
    return [beat.rank for beat in beats if beat.phase != "ended" and not alive.get(beat.pid, False)]


def left_code(beats: Sequence[Heartbeat], ranks: int) -> int | None:
    """Returns the exit code of ranks that have all left as they should; None while one has not."""
    codes = [beat.code for beat in beats if beat.phase == "ended" and beat.code is not None]
    return max(codes) if len(codes) == ranks else None


class Agent:
    """Runs and watches the ranks of one node."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spec: dict[str, Any] = json.loads((folder / "spec.json").read_text(encoding="utf-8"))
        self.name: str = self.spec["node"]
        self.peers: list[str] = self.spec["peers"]
        self.heartbeats = folder / "heartbeats"
        self.state: dict[str, Any] = {"node": self.name, "attempt": self.spec["attempt"], "pid": os.getpid()}
        self.state |= {"start": psutil.Process().create_time(), "phase": "running", "code": None, "reason": ""}
        self.stopping = False
        self._began = time.monotonic()
        self._dead_since: float | None = None
        self._left_since: float | None = None
        self._lease: Head | Member | None = None
        self._lease_s = float(self.spec["lease"]["seconds"])

    def run(self) -> int:
        """Runs to the end and returns torchrun's exit code."""
        signal.signal(signal.SIGTERM, self._asked_to_end)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        threading.Thread(target=self._publish_always, daemon=True).start()
        try:
            self._lease = self._watch_peers()
            process = self._start()
        except OSError as error:
            return self._finish(1, f"the node agent could not start: {error}")
        code, reason = self._watch(process)
        end_processes_of(self.spec["run"], 0.5)
        return self._finish(code, reason)

    def _asked_to_end(self, *_: Any) -> None:
        """By fab stop or the supervisor (`end`), or by the node's own shutdown: then the run is to go on elsewhere."""
        self.stopping = True
        if self.state["phase"] == "running" and not (self.folder / ASKED).exists():
            self.state["leaving"] = "its processes were asked to end (is it shutting down?)"

    def _start(self) -> subprocess.Popen[bytes]:
        self.heartbeats.mkdir(exist_ok=True)
        environment = {**os.environ, **self.spec["env"], HEARTBEATS_VARIABLE: str(self.heartbeats)}
        with (self.folder / "torchrun.log").open("ab") as log:
            process = subprocess.Popen(
                self.spec["argv"],
                env=environment,
                cwd=self.spec["directory"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        (self.folder / "torchrun.pid").write_text(str(process.pid))
        return process

    def _watch_peers(self) -> Head | Member | None:
        lease = self.spec["lease"]
        if not self.peers:
            return None
        if self.spec["index"] == 0:
            return Head(lease["port"], lease["token"])
        return Member(lease["address"], lease["port"], self.name, lease["token"])

    def _watch(self, process: subprocess.Popen[bytes]) -> tuple[int, str]:
        """Returns the exit code and, when it was not torchrun's own end, the reason."""
        stop_at: float | None = None
        while True:
            self._tell()
            left = left_code(read_heartbeats(self.heartbeats), self.spec["ranks"])
            if (code := process.poll()) is not None:
                # torchrun calls it a failure when ranks leave early; they know better.
                code = left if left is not None else code
                return code, "" if code in WELL else self._own_failure(code)
            if left is not None and self._torchrun_stays():
                return left, ""
            if self.stopping and stop_at is None:
                stop_at = time.monotonic() + float(self.spec["stop_grace_s"])
                process.send_signal(signal.SIGTERM)
            if stop_at is not None and time.monotonic() > stop_at:
                return 1, "the ranks did not leave in time after the request to stop"
            if reason := self._rank_fault() or self._peer_fault():
                self._dump_stacks()
                return 1, reason
            time.sleep(POLL_S)

    def _torchrun_stays(self) -> bool:
        """True when torchrun is still there long after its ranks have left."""
        self._left_since = self._left_since or time.monotonic()
        return time.monotonic() - self._left_since > LEFT_GRACE_S

    def _own_failure(self, code: int) -> str:
        if self.stopping:
            return "stopped"
        return f"torchrun ended with code {code}"

    def _rank_fault(self) -> str:
        beats = read_heartbeats(self.heartbeats)
        dead = dead_ranks(beats, {beat.pid: is_running(beat.pid, None) for beat in beats})
        now = time.monotonic()
        self._dead_since = (self._dead_since or now) if dead else None
        if self._dead_since is not None and now - self._dead_since > DEATH_GRACE_S and not self.stopping:
            return f"rank {dead[0]} died, and the others did not end by themselves"
        return hung_rank(beats, float(self.spec["hang_s"]), time.time())

    def _peer_fault(self) -> str:
        """Says why the run cannot go on: what another node says, or that one is not heard."""
        lease = self._lease
        if isinstance(lease, Head):
            ended = {name: state for name, state in lease.states.items() if state.get("phase") == "ended"}
            for name, state in ended.items():
                if state["code"] not in WELL and not self.stopping:
                    return f"{name}: {state['reason']}"
            waiting = [name for name in self.peers if name not in ended]
            lost = lost_peers(lease.seen, waiting, self._began, time.monotonic(), self._lease_s)
            return f"lost {', '.join(lost)}: not heard for {self._lease_s:.0f} s" if lost else ""
        if isinstance(lease, Member):
            if lease.verdict and lease.verdict != "finished" and not self.stopping:
                return lease.verdict
            lost = lost_peers(lease.seen, ["head"], self._began, time.monotonic(), self._lease_s)
            if lost and lease.verdict != "finished":
                return f"lost {self.peers[0]}: not heard for {self._lease_s:.0f} s"
        return ""

    def _tell(self) -> None:
        if isinstance(self._lease, Member):
            self._lease.state = dict(self.state)

    def _dump_stacks(self) -> None:
        """Each rank writes its stacks to its log before it is ended."""
        pids = {beat.pid for beat in read_heartbeats(self.heartbeats) if beat.phase != "ended"}
        for process in processes_of(self.spec["run"]):
            if process.pid in pids:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGUSR2)
        time.sleep(DUMP_WAIT_S)

    def _finish(self, code: int, reason: str) -> int:
        self.state |= {"phase": "ended", "code": code, "reason": reason}
        self._tell()
        self._publish()
        if isinstance(self._lease, Head):
            self._lease.verdict = (
                "finished" if code in WELL else (reason if ":" in reason else f"{self.name}: {reason}")
            )
            self._linger(lambda: all(self._lease_knows(name) for name in self.peers), self._lease_s)
        elif isinstance(self._lease, Member):
            self._linger(lambda: False, 2 * BEAT_S)
        return code

    def _lease_knows(self, name: str) -> bool:
        assert isinstance(self._lease, Head)
        return self._lease.states.get(name, {}).get("phase") == "ended"

    def _linger(self, done: Any, longest_s: float) -> None:
        """Goes on talking until the others know how this node ended."""
        ends = time.monotonic() + longest_s
        while time.monotonic() < ends and not done():
            time.sleep(POLL_S)

    def _publish_always(self) -> None:
        """In a thread: the shared file system may hang, and the watch must not."""
        while True:
            self._publish()
            time.sleep(BEAT_S)

    def _publish(self) -> None:
        beats = [beat.model_dump() for beat in read_heartbeats(self.heartbeats)]
        text = json.dumps({**self.state, "time": time.time(), "ranks": beats})
        for folder, name in ((self.folder, "state"), (Path(self.spec["run"]) / "nodes", self.name)):
            with contextlib.suppress(OSError):
                folder.mkdir(exist_ok=True)
                temporary = folder / f".{name}.{threading.get_ident()}"
                temporary.write_text(text, encoding="utf-8")
                temporary.replace(folder / f"{name}.json")


def stop(folder: Path, run: str) -> dict[str, Any]:
    """Asks the agent to let its ranks save and leave; returns at once."""
    _note_that_we_ask(folder)
    state = _read(folder / "state.json")
    asked = is_running(state.get("pid"), state.get("start"))
    if asked:
        os.kill(int(state["pid"]), signal.SIGTERM)
    return {"asked": asked}


def end(folder: Path, run: str) -> dict[str, Any]:
    """Ends everything of the run on this node and says what was there; also offers two free ports."""
    _note_that_we_ask(folder)
    before = len(processes_of(run))
    end_processes_of(run, 0.3)
    return {"found": before, "left": [process.pid for process in processes_of(run)], "ports": free_ports(2)}


def _note_that_we_ask(folder: Path) -> None:
    with contextlib.suppress(OSError):  # a full disk, or nothing was ever started here
        (folder / ASKED).touch()


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found


def main(arguments: Sequence[str]) -> int:
    """Entry of `python -m launch.agent`."""
    action, folder = arguments[0], Path(arguments[1])
    if action == "run":
        return Agent(folder).run()
    print(json.dumps({"stop": stop, "end": end}[action](folder, arguments[2])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

__all__ = ["FIRST_CONTACT_S", "Agent", "dead_ranks", "end", "hung_rank", "left_code", "stop"]
