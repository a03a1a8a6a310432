"""Compares the model with numbers of the reference: python -m training.golden PATH/NAME

A fixture set is NAME.json (the reference's configuration, losses, gradient norms), NAME.weights.safetensors and
NAME.golden.safetensors (inputs and expected tensors). Whatever of it is present is compared, in float32 on the CPU; a
table shows the largest error of each part against its tolerance. Exit code: 0 all within, 1 something is over, 2 the
files cannot be used.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from training.config.exported import model_section
from training.errors import EXIT_FAILED, EXIT_OK, LoopworksError, UsageError
from training.model.exits import ExitMeasure, Measure
from training.model.generate import stream
from training.model.init import effective_depth, initial_std
from training.model.recurrent import RecurrentLM

LOGITS_ATOL = 1e-4
LOSS_ATOL = 1e-5
GRADIENT_NORM_RTOL = 1e-4
GRADIENT_ATOL = 1e-5
EXIT_ATOL = 1e-4
BF16_LOSS_ATOL = 0.03
DERIVED_RTOL = 1e-6


@dataclass(frozen=True)
class Fixture:
    """One fixture set, with the model that its weights were loaded into."""

    name: str
    description: dict[str, Any]
    golden: dict[str, Tensor]
    model: RecurrentLM


@dataclass(frozen=True)
class Comparison:
    """One line of the table: the largest error of a part, and what is allowed."""

    part: str
    error: float
    tolerance: float

    @property
    def within(self) -> bool:
        """Whether the part agrees; an error that is not a number does not."""
        return self.error <= self.tolerance


def load_fixture(path: Path) -> Fixture:
    """Reads the three files of the set PATH/NAME. Raises UsageError naming the file that is missing or does not fit."""
    base = path.with_suffix("") if path.suffix == ".json" else path
    files = [base.with_name(base.name + end) for end in (".json", ".weights.safetensors", ".golden.safetensors")]
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise UsageError(
            f"no fixture set {base}: missing {', '.join(str(file) for file in missing)}",
            "give the path and common name of NAME.json, NAME.weights.safetensors and NAME.golden.safetensors",
        )
    description = _read_json(files[0])
    model = RecurrentLM(model_section(description.get("config"), files[0]))
    try:
        model.load_state_dict(_read_tensors(files[1]))
    except RuntimeError as error:
        reason = "; ".join(str(error).split("\n\t")[:3])
        raise UsageError(f"{files[1]} does not fit its configuration: {reason}", "use the files of one set") from error
    golden = _read_tensors(files[2])
    absent = {"input_ids", "labels", "initial_state"} - golden.keys()
    if absent:
        raise UsageError(f"{files[2]} holds no {' and no '.join(sorted(absent))}", "use a complete golden file")
    return Fixture(base.name, description, golden, model)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} is not readable JSON: {error}", "use an undamaged file") from error
    if not isinstance(content, dict):
        raise UsageError(f"{file} does not hold a JSON object", "use the description of a fixture set")
    return content


def _read_tensors(file: Path) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = load_file(file)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{file} is not a readable safetensors file: {error}", "use an undamaged file") from error
    return tensors


def compare(fixture: Fixture) -> list[Comparison]:
    """Returns every comparison that the fixture set allows. Raises UsageError if its tensors do not fit together."""
    parts = (_derived, _intermediate, _forward, _bf16_loss, _gradients, _exits, _decoding)
    try:
        return [comparison for part in parts for comparison in part(fixture)]
    except (KeyError, TypeError, IndexError, RuntimeError) as error:
        raise UsageError(
            f"the files of {fixture.name} do not fit together: {type(error).__name__}: {error}",
            "use the files of one set",
        ) from error


def _derived(fixture: Fixture) -> Iterator[Comparison]:
    """Parameter count and initial standard deviations."""
    config, derived = fixture.model.config, fixture.description.get("derived", {})
    ours = {
        "num_parameters": sum(p.numel() for p in fixture.model.parameters()),
        "effective_expected_depth": effective_depth(config),
        "std": initial_std("attn.Wqkv.weight", config),
        "out_proj": initial_std("attn.proj.weight", config),
        "embedding": initial_std("wte.weight", config),
        "embed_scale": fixture.model.embed_scale,
    }
    for key, value in ours.items():
        if key in derived and value is not None:
            yield Comparison(f"derived {key} (relative)", abs(value / derived[key] - 1), DERIVED_RTOL)


@torch.no_grad()
def _intermediate(fixture: Fixture) -> Iterator[Comparison]:
    """Embedding, prelude, adapter and the first core iteration."""
    model, golden = fixture.model, fixture.golden
    tokens, state = golden["input_ids"], golden["initial_state"]
    rotary = model.rotary(tokens.shape[1])
    embedded = model.encode(tokens, rotary)
    ours = {
        "embedded_scaled": model.transformer["wte"](tokens) * model.embed_scale,
        "prelude_out": embedded,
        "adapter_out_step1": model.transformer["adapter"](torch.cat((state, embedded), dim=-1)),
        "core_raw_r1": model.iterate(state, embedded, rotary),
    }
    yield from (Comparison(key, _gap(ours[key], golden[key]), LOGITS_ATOL) for key in ours if key in golden)


@torch.no_grad()
def _forward(fixture: Fixture) -> Iterator[Comparison]:
    """Latent, logits and losses at every recurrence that the file has."""
    model, golden = fixture.model, fixture.golden
    tokens, state = golden["input_ids"], golden["initial_state"]
    rotary = model.rotary(tokens.shape[1])
    for r in _recurrences(golden):
        if f"latent_r{r}" in golden:
            last, _ = model.recur(state, model.encode(tokens, rotary), rotary, r, 0)
            latent = model.transformer["ln_f"](last)
            yield Comparison(f"latent_r{r}", _gap(latent, golden[f"latent_r{r}"]), LOGITS_ATOL)
        if f"logits_r{r}" in golden:
            logits = model(tokens, steps=(r, 0), initial_state=state).logits
            yield Comparison(f"logits_r{r}", _gap(logits, golden[f"logits_r{r}"]), LOGITS_ATOL)
        for key, labels in ((f"loss_r{r}", "labels"), (f"loss_masked_r{r}", "labels_masked")):
            if key in golden and labels in golden:
                loss = model(tokens, golden[labels], steps=(r, 0), initial_state=state).loss
                yield Comparison(key, _gap(loss, golden[key]), LOSS_ATOL)


@torch.no_grad()
def _bf16_loss(fixture: Fixture) -> Iterator[Comparison]:
    """Loss under bfloat16 autocast against the float32 one."""
    golden = fixture.golden
    for r in _recurrences(golden):
        if f"loss_r{r}" in golden and "labels" in golden:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = fixture.model(
                    golden["input_ids"], golden["labels"], steps=(r, 0), initial_state=golden["initial_state"]
                ).loss
            yield Comparison(f"loss_r{r} in bf16", _gap(loss, golden[f"loss_r{r}"]), BF16_LOSS_ATOL)


def _gradients(fixture: Fixture) -> Iterator[Comparison]:
    """Loss, gradient norms and whole gradients of every truncation case."""
    model, golden = fixture.model, fixture.golden
    for case, expected in fixture.description.get("grads", {}).items():
        model.zero_grad()
        steps = (expected["num_steps_no_grad"], expected["num_steps_with_grad"])
        loss = model(golden["input_ids"], golden["labels"], steps=steps, initial_state=golden["initial_state"]).loss
        loss.backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        norms = {name: grad.norm().item() for name, grad in grads.items()}
        yield Comparison(f"{case} loss", abs(loss.item() - expected["loss"]), LOSS_ATOL)
        total = math.sqrt(sum(norm**2 for norm in norms.values()))
        yield Comparison(f"{case} total norm (relative)", abs(total / expected["total_norm"] - 1), GRADIENT_NORM_RTOL)
        worst = max(abs(norms.get(name, math.inf) / norm - 1) for name, norm in expected["norms"].items())
        yield Comparison(
            f"{case} {len(expected['norms'])} parameter norms (relative)",
            worst if norms.keys() == expected["norms"].keys() else math.inf,
            GRADIENT_NORM_RTOL,
        )
        whole = {key: key.split(".", 1)[1] for key in golden if key.startswith(f"grad_{case}.")}
        if whole:
            gap = max(_gap(grads[name], golden[key]) if name in grads else math.inf for key, name in whole.items())
            yield Comparison(f"{case} {len(whole)} whole gradients", gap, GRADIENT_ATOL)


@torch.no_grad()
def _exits(fixture: Fixture) -> Iterator[Comparison]:
    """Every exit measure after each iteration."""
    model, golden = fixture.model, fixture.golden
    for measure in get_args(Measure):
        expected = golden.get("exit_" + measure.replace("-", "_"))
        if expected is None:
            continue
        rotary = model.rotary(golden["input_ids"].shape[1])
        embedded, state = model.encode(golden["input_ids"], rotary), golden["initial_state"]
        follow, values = ExitMeasure(measure), []
        for _ in range(expected.shape[0]):
            previous, state = state, model.iterate(state, embedded, rotary)
            logits = model.head(model.decode(model.transformer["ln_f"](state), rotary))[:, -1]
            values.append(follow.update(state, previous, logits).float())
        yield Comparison(f"exit {measure}", _gap(torch.stack(values), expected), EXIT_ATOL)


def _decoding(fixture: Fixture) -> Iterator[Comparison]:
    """Greedy texts by cache, with warm start or a shared cache where the key says so, and by full recomputation."""
    golden = fixture.golden
    for key in sorted(k for k in golden if k.startswith("greedy_tokens_")):
        if (match := re.search(r"_r(\d+)", key)) is None or "greedy_prompt" not in golden:
            continue
        recurrence, warm = int(match[1]), "warm_start" in key
        budget = re.search(r"(?:budget|mod)_?(\d+)", key)
        prompt, expected = golden["greedy_prompt"].flatten(), golden[key].flatten()
        steps = list(
            stream(
                fixture.model,
                prompt,
                expected.numel() - prompt.numel(),
                recurrence=recurrence,
                warm_start=warm,
                kv_budget=int(budget[1]) if budget else None,
                state_scale=0.0,
            )
        )
        name = key.removeprefix("greedy_tokens_")
        yield _tokens_differ(f"{name} tokens", [step.token for step in steps], expected[prompt.numel() :])
        logits = golden.get(key.replace("tokens", "logits"))
        if logits is not None:
            yield Comparison(f"{name} logits", _gap(torch.stack([s.logits for s in steps]), logits), LOGITS_ATOL)
        if not warm and not budget:
            again = _recompute(fixture.model, prompt, expected.numel(), recurrence)
            yield _tokens_differ(f"{name} tokens, no cache", again[prompt.numel() :], expected[prompt.numel() :])


@torch.no_grad()
def _recompute(model: RecurrentLM, prompt: Tensor, length: int, recurrence: int) -> list[int]:
    """Greedy text without a cache: the whole sequence is run again for each token, from states of zero."""
    tokens: list[int] = prompt.tolist()
    while len(tokens) < length:
        logits = model(torch.tensor([tokens]), steps=(recurrence, 0), state_scale=0.0).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens


def _tokens_differ(part: str, tokens: list[int], expected: Tensor) -> Comparison:
    wrong = sum(a != b for a, b in zip(tokens, expected.tolist(), strict=False)) + abs(len(tokens) - expected.numel())
    return Comparison(f"{part} (number wrong)", float(wrong), 0.0)


def _recurrences(golden: dict[str, Tensor]) -> list[int]:
    found = (re.fullmatch(r"(?:latent|logits|loss|loss_masked)_r(\d+)", key) for key in golden)
    return sorted({int(match[1]) for match in found if match})


def _gap(ours: Tensor, expected: Tensor) -> float:
    """Largest absolute difference; infinite for another shape or where one is not finite."""
    if ours.squeeze().shape != expected.squeeze().shape:
        return math.inf
    gap = (ours.squeeze().float() - expected.squeeze().float()).abs().max().item()
    return gap if math.isfinite(gap) else math.inf


def table(name: str, comparisons: Sequence[Comparison]) -> str:
    """The comparisons as text, one a line."""
    width = max([len(c.part) for c in comparisons], default=0)
    lines = [f"{name}:  {'largest error':>{width + 15}}   tolerance"]
    lines += [
        f"  {c.part:<{width}}  {c.error:>13.2e}   {c.tolerance:>9.0e}   {'ok' if c.within else 'OVER'}"
        for c in comparisons
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None, write: Callable[[str], object] = print) -> int:
    """Command line. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m training.golden", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "fixture", type=Path, nargs="+", help="path and common name of a fixture set: tests/golden/tiny_a"
    )
    arguments = parser.parse_args(argv)
    failed = False
    try:
        for path in arguments.fixture:
            fixture = load_fixture(path)
            comparisons = compare(fixture)
            write(table(fixture.name, comparisons))
            failed |= not all(c.within for c in comparisons)
    except LoopworksError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    write("some parts are over their tolerance" if failed else "all within tolerance")
    return EXIT_FAILED if failed else EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
