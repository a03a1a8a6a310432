"""Text generation with a key-value cache an iteration, adaptive exit, shared caches and warm-started states.

The prompt runs all `recurrence` iterations; each new token runs as many, or fewer when an exit rule is met.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from training.errors import UsageError
from training.model.cache import DecodingCache
from training.model.exits import ExitMeasure, ExitRule
from training.model.recurrent import RecurrentLM
from training.model.state import draw_state

_STATE_STREAM = 0x57A7E  # keeps the states of generation apart from other draws of the same seed


class GeneratedToken(NamedTuple):
    """A new token, the iterations that led to it, and the float32 logits [V] it was chosen from."""

    token: int
    iterations: int
    logits: Tensor


@dataclass(frozen=True)
class GenerateResult:
    """The new tokens (without the prompt) and how many core iterations ran before each was chosen."""

    tokens: list[int]
    iterations_per_token: list[int]


def generate(
    model: RecurrentLM,
    prompt_ids: Sequence[int] | Tensor,
    max_new_tokens: int,
    *,
    recurrence: int | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    exit: ExitRule | None = None,
    kv_budget: int | None = None,
    warm_start: bool = False,
    state_scale: float = 1.0,
    stop_tokens: Sequence[int] = (),
    seed: int = 0,
) -> GenerateResult:
    """Continues `prompt_ids` by up to `max_new_tokens`; the arguments are those of `stream`."""
    steps = list(
        stream(
            model,
            prompt_ids,
            max_new_tokens,
            recurrence=recurrence,
            temperature=temperature,
            top_k=top_k,
            exit=exit,
            kv_budget=kv_budget,
            warm_start=warm_start,
            state_scale=state_scale,
            stop_tokens=stop_tokens,
            seed=seed,
        )
    )
    return GenerateResult([step.token for step in steps], [step.iterations for step in steps])


def stream(
    model: RecurrentLM,
    prompt_ids: Sequence[int] | Tensor,
    max_new_tokens: int,
    *,
    recurrence: int | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    exit: ExitRule | None = None,
    kv_budget: int | None = None,
    warm_start: bool = False,
    state_scale: float = 1.0,
    stop_tokens: Sequence[int] = (),
    seed: int = 0,
) -> Iterator[GeneratedToken]:
    """Yields new tokens one by one.

    recurrence         core iterations; None: the mean recurrence of training.
    temperature        0 takes the most likely token; otherwise one is drawn, among the top_k most likely if given.
    exit               rule that ends the iterations of a new token early.
    kv_budget          iterations share so many cache slots (iteration i uses slot i mod kv_budget).
    warm_start         a new token's state starts from the last token's final one (continuous chain of thought).
    state_scale, seed  initial states are drawn from the seed, times the scale; 0 gives zeros.
    stop_tokens        end the text; the one that did is yielded.

    Raises UsageError if prompt and new tokens do not fit into the model's context.
    """
    recurrence = model.config.mean_recurrence if recurrence is None else recurrence
    prompt = torch.as_tensor(prompt_ids, dtype=torch.long).flatten().to(model.rotary.table.device)
    _check_request(model, prompt.numel(), max_new_tokens, recurrence, kv_budget)
    decoder = _Decoder(model, prompt.numel() + max_new_tokens, recurrence, kv_budget, state_scale, seed)
    generator = torch.Generator().manual_seed(seed)
    logits, latent, iterations = decoder.advance(prompt, None, None)
    for index in range(max_new_tokens):
        token = choose_token(logits, temperature, top_k, generator)
        yield GeneratedToken(token, iterations, logits)
        if token in stop_tokens or index == max_new_tokens - 1:
            return
        state = latent[:, -1:] if warm_start else None
        logits, latent, iterations = decoder.advance(prompt.new_tensor([token]), state, exit)


def choose_token(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    """The most likely token of logits [V] at temperature 0, otherwise a draw (on the CPU: alike on all devices)."""
    if temperature == 0.0:
        return int(logits.argmax())
    logits = logits.float().cpu() / temperature
    if top_k is not None and top_k < logits.numel():
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    return int(torch.multinomial(logits.softmax(-1), 1, generator=generator))


def _check_request(model: RecurrentLM, prompt: int, new: int, recurrence: int, kv_budget: int | None) -> None:
    context = model.config.context_length
    if prompt == 0:
        raise UsageError("the prompt holds no token", "give a prompt of at least one token")
    if prompt + new > context:
        raise UsageError(
            f"{prompt} prompt tokens and {new} new ones do not fit into the context of {context} tokens",
            f"shorten the prompt or ask for at most {max(context - prompt, 0)} new tokens",
        )
    if recurrence < 1 or (kv_budget is not None and kv_budget < 1):
        raise UsageError(
            f"recurrence {recurrence} and kv_budget {kv_budget} must be at least 1", "choose positive numbers"
        )


class _Decoder:
    """The model with its cache: takes the next tokens, gives the logits of the last one."""

    def __init__(
        self,
        model: RecurrentLM,
        capacity: int,
        recurrence: int,
        kv_budget: int | None,
        state_scale: float,
        seed: int,
    ) -> None:
        self.model, self.recurrence = model, recurrence
        self.state_scale, self.seed = state_scale, seed
        like = model.transformer["ln_f"].weight
        self.cache = DecodingCache(model.config, capacity, recurrence, kv_budget, like)

    @torch.no_grad()
    def advance(self, tokens: Tensor, state: Tensor | None, rule: ExitRule | None) -> tuple[Tensor, Tensor, int]:
        """Runs `tokens` [T] behind those in the cache.

        Returns logits [V] of the last one, its final state [1, T, C] after ln_f, and the iterations that ran.
        """
        rotary = self.model.rotary(tokens.numel(), start=self.cache.length)
        embedded = self.model.encode(tokens[None], rotary, self.cache.prelude)
        if state is None:
            key = (self.seed, _STATE_STREAM, self.cache.length)
            state = draw_state(tuple(embedded.shape), embedded, key, self.state_scale)
        measure = ExitMeasure(rule.measure) if rule is not None else None
        iterations = 0
        while iterations < self.recurrence:
            previous = state
            state = self.model.iterate(state, embedded, rotary, self.cache.core(iterations))
            iterations += 1
            if rule is None or measure is None:
                continue
            logits = self._read(state, rotary)[0] if rule.needs_logits else None
            value = measure.update(state, previous, logits)
            if iterations >= rule.min_iterations and rule.met(value):
                break
        logits, latent = self._read(state, rotary)
        self.cache.finish(tokens.numel(), iterations)
        return logits[0], latent, iterations

    def _read(self, state: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [1, V] of the last token and the state after ln_f."""
        latent = self.model.transformer["ln_f"](state)
        hidden = self.model.decode(latent, rotary, self.cache.coda)
        return self.model.head(hidden[:, -1:])[:, -1], latent
