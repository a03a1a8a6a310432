"""Held-out perplexity at several recurrence counts."""

from __future__ import annotations

import math

import numpy as np
import torch

from training.config import RunConfig
from training.data.dataset import TokenDataset, label_mask
from training.data.mixture import Mixture
from training.distributed import RankInfo, sum_over_ranks
from training.engine import Engine
from training.latent import EVALUATION, latent_states


class Evaluator:
    """Measures perplexity on the first held-out sequences: always the same ones, from the same latent states."""

    def __init__(self, config: RunConfig, engine: Engine, dataset: TokenDataset | Mixture, rank: RankInfo) -> None:
        self.config, self.engine, self.dataset, self.rank = config, engine, dataset, rank

    @property
    def sequences(self) -> int:
        """Number of held-out sequences read, whatever the number of ranks and the micro-batch."""
        return min(self.config.evaluation.max_sequences, len(self.dataset))

    def perplexity(self, recurrence: int) -> float:
        """Returns exp of the mean cross entropy in nats per token with `recurrence` core iterations; a collective."""
        self.engine.deepspeed.eval()
        micro = self.engine.settings.micro_batch
        parts = math.ceil(self.sequences / micro)
        mine = range(self.rank.rank, parts, self.rank.world_size)
        losses = []
        for turn in range(math.ceil(parts / self.rank.world_size)):
            # A rank without a part of its own repeats the last one with weight 0: under ZeRO-3 all must call forward.
            index = mine[turn] if turn < len(mine) else parts - 1
            rows = range(index * micro, min((index + 1) * micro, self.sequences))
            loss = self._loss(rows, recurrence)
            losses.append((loss * len(rows), len(rows)) if turn < len(mine) else (0.0, 0))
        self.engine.deepspeed.train()
        total = torch.tensor(np.sum(losses, axis=0), dtype=torch.float64, device=self.rank.device)
        weighted, count = sum_over_ranks(total).tolist()
        # A model that has diverged can have a loss whose exponential does not fit a float.
        return math.exp(min(weighted / count, 700.0))

    def _loss(self, rows: range, recurrence: int) -> float:
        block = self.dataset.read(np.asarray(rows, dtype=np.int64)).astype(np.int64)
        tokens = torch.from_numpy(np.ascontiguousarray(block[:, :-1])).to(self.rank.device)
        labels = torch.from_numpy(label_mask(block, self.dataset.pad_token_id)).to(self.rank.device)
        like = torch.empty(0, device=self.rank.device)
        state = latent_states(self.config.run.seed, EVALUATION, rows, tokens.shape[1], self.config.model.width, like)
        output = self.engine.evaluate(tokens, labels, steps=(recurrence, 0), initial_state=state)
        assert output.loss is not None
        return float(output.loss)
