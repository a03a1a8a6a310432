"""FLOP of the recurrent model by closed formula, counting the iterations that run. Torch-free: the plan uses it.

A multiplication and an addition count as two. Matrix products and attention are counted; norms, activations and the
embedding look-up are not (below one per cent). With r = n + k iterations per micro-batch, forward runs the core r
times and backward k times, because the first n iterations get no gradient. Backward costs twice the forward of what
it covers.
"""

from __future__ import annotations

from dataclasses import dataclass

from training.config.schema import ModelSection
from training.model_size import block_matrix_elements


@dataclass(frozen=True)
class ForwardFlop:
    """FLOP of one token's forward pass by part; `iteration` is one pass through adapter and core blocks."""

    prelude: float
    iteration: float
    coda: float
    head: float


def forward_flop(model: ModelSection, sequence_length: int, *, causal: bool = True) -> ForwardFlop:
    """Returns the forward FLOP per token, averaged over a sequence of `sequence_length` tokens.

    causal: a token attends to (T + 1) / 2 tokens on average, which is what a causal kernel computes. causal=False
    counts all T, as the PaLM formula, many published utilisation figures and torch's FlopCounterMode do.
    """
    attended = (sequence_length + 1) / 2 if causal else float(sequence_length)
    block = 2 * block_matrix_elements(model) + 4 * attended * model.width
    return ForwardFlop(
        prelude=model.prelude_layers * block,
        iteration=model.core_layers * block + 4 * model.width**2,
        coda=model.coda_layers * block,
        head=2.0 * model.vocab_size * model.width,
    )


def flop_per_token(
    model: ModelSection, sequence_length: int, n: float, k: float, *, recompute: bool = False, causal: bool = True
) -> float:
    """Returns the FLOP per token of one training step, forward and backward.

    n, k        iterations without and with gradient; means are welcome, the formula is linear in both.
    recompute   adds the second forward of activation checkpointing. Off for model FLOP utilisation (MFU), which counts
                useful work; on for hardware utilisation (HFU) and for estimates of time.
    """
    part = forward_flop(model, sequence_length, causal=causal)
    forward = part.prelude + (n + k) * part.iteration + part.coda + part.head
    # Without a graded iteration nothing flows back into the prelude.
    backward = 2 * ((part.prelude if k > 0 else 0.0) + k * part.iteration + part.coda + part.head)
    return forward + backward + (k * part.iteration if recompute else 0.0)


def inference_flop_per_token(model: ModelSection, sequence_length: int, r: float, *, causal: bool = True) -> float:
    """Returns the FLOP per token of a forward pass of `r` iterations."""
    part = forward_flop(model, sequence_length, causal=causal)
    return part.prelude + r * part.iteration + part.coda + part.head
