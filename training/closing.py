"""The closing table of a run: held-out perplexity by recurrence, simple models beside it, and a sample."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from training.config import RunConfig
from training.data.baselines import baseline_perplexities
from training.data.dataset import TokenDataset
from training.data.formats import TokenArray
from training.data.mixture import Mixture
from training.engine import Engine
from training.evaluation import Evaluator
from training.records import RunFolder

if TYPE_CHECKING:
    from training.safety import Progress

_BLOCK_SEQUENCES = 4096


def closing_report(
    config: RunConfig,
    train_set: TokenDataset | Mixture,
    evaluator: Evaluator,
    engine: Engine,
    run: RunFolder,
    progress: Progress,
    seconds: float,
) -> dict[str, Any]:
    """Evaluates the trained model on all ranks; the report is complete on rank 0."""
    mean = config.model.mean_recurrence
    if engine.rank.is_first:
        run.update_state(phase="evaluating", step=progress.step)
    counts = sorted({1, mean, *config.evaluation.recurrences})
    perplexity = {r: evaluator.perplexity(r) for r in counts}
    if not engine.rank.is_first:
        return {}
    baselines = baseline_perplexities(
        train_set.blocks(),
        _blocks(evaluator.dataset, evaluator.sequences),
        train_set.manifest.vocab_size,
        train_set.pad_token_id,
    )
    for r, value in perplexity.items():
        run.event("evaluation", progress.step, f"perplexity {value:.2f} at r={r}", recurrence=r, perplexity=value)
    return {
        "run": run.name,
        "steps": progress.step,
        "tokens": progress.tokens,
        "seconds": seconds,
        "parameters": sum(p.ds_numel if hasattr(p, "ds_numel") else p.numel() for p in engine.model.parameters()),
        "held_out_sequences": evaluator.sequences,
        "mean_recurrence": mean,
        "perplexity": {str(r): value for r, value in perplexity.items()},
        "unigram_perplexity": baselines.unigram_perplexity,
        "bigram_perplexity": baselines.bigram_perplexity,
        "mean_over_one_gain_ratio": perplexity[1] / perplexity[mean],
        "sample": _sample(config, run) if config.evaluation.sample_tokens else "",
    }


def show_report(report: dict[str, Any], consoles: Sequence[Console]) -> None:
    """Prints the closing table and the sample."""
    table = Table(
        title=f"run {report['run']}: {report['tokens']:,} tokens in {report['seconds']:.0f} s", title_justify="left"
    )
    table.add_column("held-out perplexity")
    table.add_column("value", justify="right")
    for r, value in report["perplexity"].items():
        mark = " (mean of training)" if int(r) == report["mean_recurrence"] else ""
        table.add_row(f"this model, r = {r}{mark}", f"{value:.1f}")
    table.add_row("bigram model", f"{report['bigram_perplexity']:.1f}")
    table.add_row("unigram model", f"{report['unigram_perplexity']:.1f}")
    gain = report["mean_over_one_gain_ratio"]
    for console in consoles:
        console.print(table)
        console.print(
            f"Iterating is worth a factor of {gain:.2f}: perplexity at r = 1 over r = {report['mean_recurrence']}.",
            highlight=False,
        )
        if report["sample"]:
            console.print("\nsample:", highlight=False)
            console.print(report["sample"], highlight=False, markup=False)


def _blocks(dataset: TokenDataset | Mixture, sequences: int) -> Iterator[TokenArray]:
    for start in range(0, sequences, _BLOCK_SEQUENCES):
        yield dataset.read(np.arange(start, min(start + _BLOCK_SEQUENCES, sequences), dtype=np.int64))


def _sample(config: RunConfig, run: RunFolder) -> str:
    from training.generate import continue_text
    from training.saving import newest_model

    return continue_text(
        newest_model(run), config.evaluation.prompt, tokens=config.evaluation.sample_tokens, seed=config.run.seed
    )
