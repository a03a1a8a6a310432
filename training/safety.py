"""Keeps a run safe: saves when they are due, goes on from them, and goes back when the loss breaks.

All methods are called by all ranks in the same order, and what they decide follows from values that all ranks share.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from training.checkpoint.manager import CheckpointManager
from training.checkpoint.state import SavedProgress
from training.config.schema import CheckpointSection
from training.data.order import Cursor
from training.errors import NonFiniteError
from training.guards import GiveUp, GuardSettings, GuardState, Rollback, Skip, next_position, observe, plan_rollback
from training.preemption import StopFlag


@dataclass
class Progress:
    """Where the run is: all that a restart needs besides weights and optimizer."""

    step: int = 0
    cursor: Cursor = field(default_factory=Cursor)
    tokens: int = 0
    nonfinite_in_a_row: int = 0
    rollbacks: int = 0
    skips: tuple[Skip, ...] = ()

    def saved(self) -> SavedProgress:
        """Returns it in the form that checkpoints hold."""
        counters = {"tokens": self.tokens, "rollbacks": self.rollbacks}
        skips = tuple((skip.first, skip.stop) for skip in self.skips)
        return SavedProgress(self.step, self.cursor.epoch, self.cursor.sample, counters, skips)

    @classmethod
    def of(cls, saved: SavedProgress) -> Progress:
        """Returns the progress that a checkpoint holds."""
        return cls(
            step=saved.step,
            cursor=Cursor(saved.epoch, saved.sample),
            tokens=int(saved.counters.get("tokens", 0)),
            rollbacks=int(saved.counters.get("rollbacks", 0)),
            skips=tuple(Skip(first, stop) for first, stop in saved.skips),
        )


def advance(progress: Progress, batch: int, sequences: int) -> bool:
    """Moves the cursor over the batch just trained on, and over data that is skipped; True when it jumped."""
    after = progress.cursor.position(sequences) + batch
    position = next_position(after, batch, progress.skips)
    progress.cursor = Cursor(*divmod(position, sequences))
    return position != after


class Safety:
    """The checkpoints and the loss guard of one run."""

    def __init__(self, manager: CheckpointManager, flag: StopFlag, section: CheckpointSection) -> None:
        self.manager, self.flag = manager, flag
        self._guard_on = section.max_rollbacks > 0
        self._settings = GuardSettings(
            spike_deviations=section.spike_deviations,
            spike_ratio=section.spike_ratio,
            patience_steps=section.spike_patience_steps,
            max_rollbacks=section.max_rollbacks,
        )
        self._state = GuardState()
        # Stream positions at which the bad steps in a row began: what a rollback leaves out.
        self._bad_from: int | None = None

    def resume(self) -> Progress | None:
        """Loads the newest checkpoint that can be trusted; None when there is none."""
        resumed = self.manager.resume()
        return None if resumed is None else Progress.of(resumed.progress)

    def wants_save(self, step: int) -> bool:
        """Whether this rank wants a save after `step`; the ranks vote, since clocks and notices differ."""
        return self.flag.save or self.manager.due(step)

    def save(self, progress: Progress, evaluation_loss: float | None, *, wait: bool) -> float | None:
        """Saves and returns the seconds that the loop was held up; None while the loss is under suspicion."""
        if self._bad_from is not None and not wait:
            return None
        stall_s = self.manager.save(progress.saved(), evaluation_loss, wait=wait)
        self.flag.saved()
        return stall_s

    def judge(self, progress: Progress, loss: float, positions: Skip) -> Rollback | None:
        """Looks at the loss of the step just done, which was trained on `positions`; returns where to go back to.

        Raises NonFiniteError when the budget of rollbacks is used up.
        """
        if not self._guard_on:
            return None
        self._state, verdict = observe(self._state, progress.step, loss, self._settings)
        if verdict == "good":
            self._bad_from = None
            return None
        if self._bad_from is None:
            self._bad_from = positions.first
        if verdict == "suspect":
            return None
        plan = plan_rollback(
            self._state, progress.step, Skip(self._bad_from, positions.stop), progress.rollbacks, self._settings
        )
        if isinstance(plan, GiveUp):
            raise NonFiniteError(plan.reason, "lower training.learning_rate, or look at the data of those steps")
        return plan

    def roll_back(self, progress: Progress, plan: Rollback, batch: int, sequences: int) -> Progress | None:
        """Loads the checkpoint that `plan` names and returns the progress from there, the bad data left out.

        None when there is no checkpoint that old: the run then goes on from where it is.
        """
        self._state, self._bad_from = GuardState(), None
        resumed = self.manager.resume(at_most_step=plan.at_most_step)
        if resumed is None:
            return None
        back = Progress.of(resumed.progress)
        back.rollbacks = progress.rollbacks + 1
        back.skips = (*progress.skips, plan.skip)
        position = next_position(back.cursor.position(sequences), batch, back.skips)
        back.cursor = Cursor(*divmod(position, sequences))
        return back
