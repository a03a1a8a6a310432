"""The training loop."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from training.callbacks import Callback, StepReport
from training.config import RunConfig
from training.data.dataset import TokenDataset
from training.data.loader import make_loader
from training.data.mixture import Mixture
from training.data.order import rank_positions
from training.distributed import RankInfo, sum_over_ranks
from training.engine import Engine, StepOutcome
from training.errors import NonFiniteError
from training.evaluation import Evaluator
from training.flops import flop_per_token
from training.guards import Skip, health_alarms
from training.latent import TRAINING, latent_states
from training.metrics_window import MetricsWindow, StepSample
from training.model.sampler import RecurrenceSampler
from training.optim import lr_at
from training.phases import Span, seconds_by_phase
from training.preemption import StopFlag
from training.records import RunFolder
from training.safety import Progress, Safety, advance

HEALTH_FROM_STEP = 1000


@dataclass(frozen=True)
class GlobalStep:
    """What all ranks together measured in one step, and what any of them wants."""

    loss: float
    positions: Skip
    stop: bool
    save: bool


class Trainer:
    """Takes an engine through the steps of a run."""

    def __init__(
        self,
        config: RunConfig,
        rank: RankInfo,
        engine: Engine,
        dataset: TokenDataset | Mixture,
        run: RunFolder,
        *,
        total_steps: int,
        evaluator: Evaluator,
        safety: Safety | None = None,
        flag: StopFlag | None = None,
        callbacks: Sequence[Callback] = (),
        peak_flop_per_s: float | None = None,
    ) -> None:
        self.config, self.rank, self.engine, self.dataset, self.run = config, rank, engine, dataset, run
        self.total_steps = total_steps
        self.evaluator = evaluator
        self.callbacks = callbacks
        self.safety = safety
        self.flag = flag or StopFlag()
        self.progress = Progress()
        self.sampler = RecurrenceSampler(config.model)
        self.window = MetricsWindow(peak_flop_per_s)
        self._last_correlation: float | None = None
        self._batches: Iterator[tuple[Tensor, Tensor]] | None = None

    def fit(self) -> Progress:
        """Trains until the last step, or until a stop is requested on any rank; what it reached is saved."""
        self._tell("on_start", self.progress.step, self.total_steps)
        try:
            while self.progress.step < self.total_steps:
                step = self.train_step()
                if self._roll_back_when_due(step):
                    continue
                evaluation_loss = self._evaluate_when_due()
                self._save_when_due(step, evaluation_loss)
                if step.stop:
                    break
        finally:
            self._tell("on_end")
        return self.progress

    def train_step(self) -> GlobalStep:
        """One optimizer step of all ranks."""
        began = time.perf_counter()
        self.engine.clock.begin()
        step = self.progress.step
        # One draw a step: every micro-batch and every rank runs the same iterations, however the batch is factored.
        iterations = self.sampler.draw(self.config.run.seed, step, 0)
        learning_rate = lr_at(step + 1, self.config.training, self.total_steps)
        first = self.progress.cursor.position(len(self.dataset))
        losses, stats = self._micro_steps(iterations)
        outcome = self.engine.finish_step(learning_rate)
        measured = self._agree(losses, first)
        self._advance()
        self._count_nonfinite(outcome, measured.loss)
        seconds, spans = time.perf_counter() - began, self.engine.clock.end()
        self.window.add(
            StepSample(
                loss=measured.loss if outcome.applied else math.nan,
                grad_norm=outcome.grad_norm,
                learning_rate=learning_rate,
                iterations=sum(iterations),
                flop=self._flop(iterations),
                seconds=seconds,
                phase_s=seconds_by_phase(spans),
                tokens=self._tokens_per_step,
                stats=stats,
            )
        )
        self._report(seconds, spans)
        return measured if outcome.applied else replace(measured, loss=math.nan)

    def _micro_steps(self, iterations: tuple[int, int]) -> tuple[list[Tensor], dict[str, float]]:
        """Forward and backward of this rank's part: losses and health statistics."""
        positions = self._positions()
        batches = self._batches = self._batches or self._new_batches()
        with_stats = self._is_log_step(self.progress.step + 1)
        losses: list[Tensor] = []
        stats: dict[str, float] = {}
        for index, part in enumerate(positions):
            tokens, labels = next(batches)
            self.engine.clock.mark("data")
            last = index == len(positions) - 1
            output = self.engine.micro_step(
                tokens.to(self.rank.device, non_blocking=True),
                labels.to(self.rank.device, non_blocking=True),
                last,
                steps=iterations,
                initial_state=self._latent_states(part),
                with_stats=with_stats and last,
            )
            assert output.loss is not None
            losses.append(output.loss.detach())
            if output.state_stats is not None:
                stats = {name: float(value) for name, value in output.state_stats.items()}
                self._last_correlation = stats.get("token_correlation")
        return losses, stats

    def _agree(self, losses: list[Tensor], first: int) -> GlobalStep:
        """Mean loss over the global batch, and what any rank wants: one small collective a step."""
        wants_save = self.safety is not None and self.safety.wants_save(self.progress.step + 1)
        loss = torch.stack(losses).float().mean()
        total = sum_over_ranks(torch.stack([loss, *loss.new_tensor([float(self.flag.stop), float(wants_save)])]))
        mean, stop, save = total.tolist()
        positions = Skip(first, first + self.config.training.batch_size)
        return GlobalStep(mean / self.rank.world_size, positions, stop > 0, save > 0)

    def _advance(self) -> None:
        self.progress.step += 1
        self.progress.tokens += self._tokens_per_step
        if advance(self.progress, self.config.training.batch_size, len(self.dataset)):
            self._batches = None

    def _roll_back_when_due(self, step: GlobalStep) -> bool:
        """Goes back to the last good checkpoint when the loss has been bad for too long; True when it did."""
        if self.safety is None:
            return False
        plan = self.safety.judge(self.progress, step.loss, step.positions)
        if plan is None:
            return False
        batch = self.config.training.batch_size
        back = self.safety.roll_back(self.progress, plan, batch, len(self.dataset))
        at = self.progress.step
        if back is None:
            self._announce("rollback", f"step {at}: {plan.reason}; there is no checkpoint before it to go back to")
            return False
        self.progress, self._batches = back, None
        left_out = f"sequences {plan.skip.first} to {plan.skip.stop - 1} of the stream are left out"
        self._announce("rollback", f"step {at}: {plan.reason}; went back to step {back.step}, {left_out}")
        return True

    def _save_when_due(self, step: GlobalStep, evaluation_loss: float | None) -> None:
        if self.safety is None:
            return
        leaving = step.stop or self.progress.step >= self.total_steps
        if step.save or leaving:
            self.safety.save(self.progress, evaluation_loss, wait=leaving)
        self.safety.manager.poll()

    def _count_nonfinite(self, outcome: StepOutcome, loss: float) -> None:
        """Counts skipped steps in a row and ends the run when they go on; every rank sees the same outcome."""
        if outcome.applied and math.isfinite(loss):
            self.progress.nonfinite_in_a_row = 0
            return
        self.progress.nonfinite_in_a_row += 1
        count, limit = self.progress.nonfinite_in_a_row, self.config.training.max_nonfinite_steps
        message = (
            f"step {self.progress.step}: loss or gradients are not finite; the step was skipped ({count} in a row)"
        )
        self._announce("nonfinite", message, in_a_row=count)
        if count > limit:
            raise NonFiniteError(
                f"loss or gradients were not finite for {count} steps in a row, up to step {self.progress.step}",
                "lower training.learning_rate or lengthen training.warmup_steps (limit: training.max_nonfinite_steps)",
            )

    def _report(self, seconds: float, spans: Sequence[Span]) -> None:
        step = self.progress.step
        metrics = self.window.close(step, self.progress.tokens) if self._is_log_step(step) else None
        self._tell("on_step", StepReport(step, self.total_steps, metrics, seconds, tuple(spans)))

    def _evaluate_when_due(self) -> float | None:
        """Measures held-out perplexity at r=1 and the mean; returns the loss at the mean, None when it is not due."""
        interval = self.config.evaluation.interval_steps
        step = self.progress.step
        if interval is None or step % interval or step == self.total_steps:
            return None
        recurrence = self.config.model.mean_recurrence
        one, mean = self.evaluator.perplexity(1), self.evaluator.perplexity(recurrence)
        text = f"step {step}: held-out perplexity {mean:.2f} at r={recurrence}, {one:.2f} at r=1"
        self._announce("evaluation", text, perplexity=mean, perplexity_one=one, recurrence=recurrence)
        # A model that has hardly learned anything does not use its state either.
        if step >= min(HEALTH_FROM_STEP, self.total_steps // 2):
            for alarm in health_alarms(self._last_correlation, one, mean):
                self._announce("health", f"step {step}: {alarm}")
        return math.log(mean)

    def _announce(self, kind: str, message: str, **details: Any) -> None:
        """Records an event and tells the callbacks."""
        if self.rank.is_first:
            self.run.event(kind, self.progress.step, message, **details)
        self._tell("on_message", message)

    def _new_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(
            make_loader(
                self.dataset,
                seed=self.config.run.seed,
                cursor=self.progress.cursor,
                global_batch_size=self.config.training.batch_size,
                micro_batch_size=self.engine.settings.micro_batch,
                rank=self.rank.rank,
                world_size=self.rank.world_size,
                num_workers=self.config.data.num_workers,
                pin_memory=self._pins_memory,
                prefetch_factor=self.config.data.prefetch_factor,
            )
        )

    def _positions(self) -> Any:
        return rank_positions(
            self.progress.cursor.position(len(self.dataset)),
            global_batch_size=self.config.training.batch_size,
            micro_batch_size=self.engine.settings.micro_batch,
            rank=self.rank.rank,
            world_size=self.rank.world_size,
        )

    def _latent_states(self, positions: Sequence[int]) -> Tensor:
        width, like = self.config.model.width, torch.empty(0, device=self.rank.device)
        return latent_states(self.config.run.seed, TRAINING, positions, self._length, width, like)

    def _flop(self, iterations: tuple[int, int]) -> float:
        return self._tokens_per_step * flop_per_token(self.config.model, self._length, *iterations)

    @property
    def _pins_memory(self) -> bool:
        wanted = self.config.data.pin_memory
        return self.rank.device.type == "cuda" if wanted == "auto" else wanted

    @property
    def _length(self) -> int:
        return int(self.dataset.sequence_length)

    @property
    def _tokens_per_step(self) -> int:
        return self.config.training.batch_size * self._length

    def _is_log_step(self, step: int) -> bool:
        return step % self.config.monitoring.log_interval_steps == 0 or step == self.total_steps

    def _tell(self, method: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, method)(*arguments)
