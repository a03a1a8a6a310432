"""Continues a prompt with the saved model of a run: `python -m training.generate --run runs/NAME --prompt TEXT`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from training.errors import EXIT_OK, UsageError
from training.faults import as_loopworks_error
from training.records import RunFolder

if TYPE_CHECKING:
    from training.model.exits import Measure

# Names on the command line, and what the model room calls them.
EXIT_MEASURES: dict[str, Measure] = {"kl": "kl", "latent": "latent-diff"}


def continue_text(folder: Path, prompt: str, *, tokens: int, seed: int = 0, temperature: float = 0.8) -> str:
    """Returns the prompt and its continuation by the model in `folder`."""
    return prompt + "".join(stream_text(folder, prompt, tokens=tokens, seed=seed, temperature=temperature))


def stream_text(
    folder: Path,
    prompt: str,
    *,
    tokens: int,
    seed: int = 0,
    temperature: float = 0.8,
    recurrence: int | None = None,
    exit_rule: str = "none",
) -> Iterator[str]:
    """Yields the continuation piece by piece. Raises UsageError for a prompt that does not fit."""
    from tokenizers import Tokenizer

    from training.model.exits import ExitRule
    from training.model.generate import stream
    from training.saving import load_model

    model, config = load_model(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode(prompt).ids
    room = config.model.context_length - len(ids)
    if not ids or room < 1:
        raise UsageError(
            f"the prompt has {len(ids)} tokens; it must have 1 to {config.model.context_length - 1}", "shorten --prompt"
        )
    rule = ExitRule(EXIT_MEASURES[exit_rule]) if exit_rule in EXIT_MEASURES else None
    made: list[int] = []
    shown = ""
    for token in stream(
        model, ids, min(tokens, room), recurrence=recurrence, temperature=temperature, exit=rule, seed=seed
    ):
        made.append(token.token)
        # Decoded as a whole: a character may need several tokens, and half of one shows as U+FFFD.
        text = tokenizer.decode(made)
        if not text.endswith("\ufffd"):
            yield text[len(shown) :]
            shown = text


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m training.generate", description="Continue a prompt.")
    parser.add_argument("--run", required=True, help="run folder")
    parser.add_argument("--prompt", required=True, help="text to continue")
    parser.add_argument("--tokens", type=int, default=100, help="tokens to write")
    parser.add_argument("--recurrence", type=int, default=None, help="core iterations (default: the model's mean)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token")
    parser.add_argument("--exit", default="none", choices=("none", *EXIT_MEASURES), help="stop iterating early")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    try:
        return _print_continuation(options)
    except Exception as error:  # foreseen ones get one line, defects their traceback
        known = as_loopworks_error(error)
        if known is None:
            raise
        print(f"error: {known}", file=sys.stderr)
        return known.exit_code


def _print_continuation(options: argparse.Namespace) -> int:
    from training.saving import newest_model

    if options.tokens < 1 or options.temperature < 0 or (options.recurrence is not None and options.recurrence < 1):
        raise UsageError("--tokens and --recurrence must be at least 1, --temperature at least 0", "correct the call")
    pieces = stream_text(
        newest_model(RunFolder(options.run)),
        options.prompt,
        tokens=options.tokens,
        seed=options.seed,
        temperature=options.temperature,
        recurrence=options.recurrence,
        exit_rule=options.exit,
    )
    if options.json:
        print(json.dumps({"prompt": options.prompt, "continuation": "".join(pieces)}))
        return EXIT_OK
    print(options.prompt, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
