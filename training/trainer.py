"""The training loop."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from training.callbacks import Callback, StepReport
from training.config import RunConfig
from training.data.loader import make_loader
from training.data.order import Cursor, rank_positions
from training.distributed import RankInfo, sum_over_ranks
from training.engine import Engine, StepOutcome
from training.errors import NonFiniteError
from training.evaluation import Evaluator
from training.flops import flop_per_token
from training.latent import TRAINING, latent_states
from training.metrics_window import MetricsWindow, StepSample
from training.model.sampler import RecurrenceSampler
from training.optim import lr_at
from training.records import RunFolder


@dataclass
class Progress:
    """Where the run is: all that a restart needs besides weights and optimizer."""

    step: int = 0
    cursor: Cursor = field(default_factory=Cursor)
    tokens: int = 0
    nonfinite_in_a_row: int = 0


@dataclass(frozen=True)
class GlobalStep:
    """What all ranks together measured in one step."""

    loss: float
    stop_requested: bool


class Trainer:
    """Takes an engine through the steps of a run."""

    def __init__(
        self,
        config: RunConfig,
        rank: RankInfo,
        engine: Engine,
        dataset: Any,
        run: RunFolder,
        *,
        total_steps: int,
        evaluator: Evaluator,
        callbacks: Sequence[Callback] = (),
        peak_flop_per_s: float | None = None,
    ) -> None:
        self.config, self.rank, self.engine, self.dataset, self.run = config, rank, engine, dataset, run
        self.total_steps = total_steps
        self.evaluator = evaluator
        self.callbacks = callbacks
        self.progress = Progress()
        self.sampler = RecurrenceSampler(config.model)
        self.window = MetricsWindow(peak_flop_per_s)
        self.stop_requested = False

    def fit(self) -> Progress:
        """Trains until the last step, or until a stop is requested on any rank."""
        self._tell("on_start", self.progress.step, self.total_steps)
        batches = self._batches()
        try:
            while self.progress.step < self.total_steps:
                stop = self.train_step(batches)
                self._evaluate_when_due()
                if stop:
                    break
        finally:
            self._tell("on_end")
        return self.progress

    def train_step(self, batches: Iterator[tuple[Tensor, Tensor]]) -> bool:
        """One optimizer step; returns True when a rank was asked to stop."""
        began = time.perf_counter()
        step = self.progress.step
        # One draw a step: every micro-batch and every rank runs the same iterations, however the batch is factored.
        iterations = self.sampler.draw(self.config.run.seed, step, 0)
        learning_rate = lr_at(step + 1, self.config.training, self.total_steps)
        losses, stats, data_wait_s = self._micro_steps(batches, iterations)
        outcome = self.engine.finish_step(learning_rate)
        measured = self._agree(losses)
        self._advance()
        self._guard(outcome, measured.loss)
        self.window.add(
            StepSample(
                loss=measured.loss if outcome.applied else math.nan,
                grad_norm=outcome.grad_norm,
                learning_rate=learning_rate,
                iterations=sum(iterations),
                flop=self._flop(iterations),
                seconds=time.perf_counter() - began,
                data_wait_s=data_wait_s,
                tokens=self._tokens_per_step,
                stats=stats,
            )
        )
        self._report()
        return measured.stop_requested

    def _micro_steps(
        self, batches: Iterator[tuple[Tensor, Tensor]], iterations: tuple[int, int]
    ) -> tuple[list[Tensor], dict[str, float], float]:
        """Forward and backward of this rank's part: losses, health statistics, seconds of waiting for data."""
        positions = self._positions()
        with_stats = self._is_log_step(self.progress.step + 1)
        losses: list[Tensor] = []
        stats: dict[str, float] = {}
        data_wait_s = 0.0
        for index, part in enumerate(positions):
            waiting = time.perf_counter()
            tokens, labels = next(batches)
            data_wait_s += time.perf_counter() - waiting
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
        return losses, stats, data_wait_s

    def _agree(self, losses: list[Tensor]) -> GlobalStep:
        """Mean loss over the global batch, and whether any rank was asked to stop: one small collective a step."""
        values = torch.stack([torch.stack(losses).float().mean(), losses[0].new_tensor(self.stop_requested).float()])
        total = sum_over_ranks(values).tolist()
        return GlobalStep(total[0] / self.rank.world_size, total[1] > 0)

    def _advance(self) -> None:
        batch = self.config.training.batch_size
        self.progress.step += 1
        self.progress.tokens += self._tokens_per_step
        self.progress.cursor = self.progress.cursor.advance(batch, len(self.dataset))

    def _guard(self, outcome: StepOutcome, loss: float) -> None:
        """Counts skipped steps in a row and ends the run when they go on; every rank sees the same outcome."""
        if outcome.applied and math.isfinite(loss):
            self.progress.nonfinite_in_a_row = 0
            return
        self.progress.nonfinite_in_a_row += 1
        count, limit = self.progress.nonfinite_in_a_row, self.config.training.max_nonfinite_steps
        message = (
            f"step {self.progress.step}: loss or gradients are not finite; the step was skipped ({count} in a row)"
        )
        if self.rank.is_first:
            self.run.event("nonfinite", self.progress.step, message, in_a_row=count)
        self._tell("on_message", message)
        if count > limit:
            raise NonFiniteError(
                f"loss or gradients were not finite for {count} steps in a row, up to step {self.progress.step}",
                "lower training.learning_rate or lengthen training.warmup_steps (limit: training.max_nonfinite_steps)",
            )

    def _report(self) -> None:
        step = self.progress.step
        metrics = self.window.close(step, self.progress.tokens) if self._is_log_step(step) else None
        self._tell("on_step", StepReport(step, self.total_steps, metrics))

    def _evaluate_when_due(self) -> None:
        interval = self.config.evaluation.interval_steps
        step = self.progress.step
        if interval is None or step % interval or step == self.total_steps:
            return
        recurrence = self.config.model.mean_recurrence
        perplexity = self.evaluator.perplexity(recurrence)
        if self.rank.is_first:
            self.run.event("evaluation", step, f"perplexity {perplexity:.2f} at r={recurrence}", perplexity=perplexity)
        self._tell("on_message", f"step {step}: held-out perplexity {perplexity:.2f} at r={recurrence}")

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
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
                pin_memory=self.rank.device.type == "cuda",
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
