"""What preparation did to the text: a table for the screen, report.md and report.json for the folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from training.data.files import write_atomically
from training.data.manifest import Manifest
from training.data.progress import human_bytes
from training.data.stage_clean import Counts
from training.data.stage_dedup import RULES
from training.data.workfolder import WorkFolder, read_documents


@dataclass(frozen=True)
class Report:
    """Counts of a preparation. `wall_s` stays out of the files: they are the same after every run."""

    content: dict[str, Any]
    wall_s: float


def build_report(
    work: WorkFolder, cleaned: list[dict[str, Any]], encoded: list[dict[str, Any]], manifest: Manifest
) -> dict[str, Any]:
    """Adds up the counts of all parts."""
    counts = Counts()
    for part, found in enumerate(cleaned):
        counts.add(found)
        _count_duplicates(work, part, counts)
    tokens = sum(part["tokens"] for part in encoded)
    kept = {split: manifest.tokens(split) for split in manifest.splits}
    return {
        "documents_in": counts.documents_in,
        "bytes_in": counts.bytes_in,
        "documents_out": sum(part["documents"] for part in encoded),
        "bytes_out": sum(part["bytes"] for part in encoded),
        "dropped": counts.dropped,
        "validation_documents": sum(part["validation_documents"] for part in encoded),
        "tokens": tokens,
        "tokens_packed": kept,
        "tokens_lost_in_packing": tokens - sum(kept.values()),
        "sequences": {split: manifest.sequences(split) for split in manifest.splits},
        "shards": {split: len(shards) for split, shards in manifest.splits.items()},
        "vocab_size": manifest.vocab_size,
    }


def _count_duplicates(work: WorkFolder, part: int, counts: Counts) -> None:
    verdicts = np.load(work.dropped(part))
    if not verdicts.any():
        return
    for document, verdict in zip(read_documents(work.clean(part, "docs")), verdicts, strict=True):
        if verdict:
            counts.drop(RULES[int(verdict)], len(document.text.encode()), document.origin, document.text)


def write_report(out: Path, content: dict[str, Any]) -> None:
    """Writes report.json and report.md. Raises StorageError."""
    text = json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    write_atomically(out / "report.json", text.encode())
    write_atomically(out / "report.md", _markdown(content).encode())


def _rows(content: dict[str, Any]) -> list[tuple[str, str, str]]:
    rows = [("read", f"{content['documents_in']:,}", human_bytes(content["bytes_in"]))]
    for rule, entry in sorted(content["dropped"].items(), key=lambda item: -item[1]["documents"]):
        rows.append((f"dropped: {rule}", f"{entry['documents']:,}", human_bytes(entry["bytes"])))
    rows.append(("kept", f"{content['documents_out']:,}", human_bytes(content["bytes_out"])))
    rows.append(("  of these held out", f"{content['validation_documents']:,}", ""))
    return rows


def _summary(content: dict[str, Any]) -> str:
    splits = ", ".join(f"{split} {count:,}" for split, count in sorted(content["sequences"].items()))
    return (
        f"{content['tokens']:,} tokens ({content['tokens_lost_in_packing']:,} lost in packing), "
        f"vocabulary {content['vocab_size']:,}; sequences: {splits}"
    )


def _markdown(content: dict[str, Any]) -> str:
    lines = ["# Preparation report", "", "| | documents | text |", "|---|---:|---:|"]
    lines += [f"| {what.strip()} | {documents} | {size} |" for what, documents, size in _rows(content)]
    lines += ["", _summary(content), ""]
    for rule, entry in sorted(content["dropped"].items()):
        lines += [f"## Dropped by {rule}, for example", ""]
        lines += [f"- `{example['origin']}`: {_escape(example['text'])}" for example in entry["examples"]]
        lines.append("")
    return "\n".join(lines)


def _escape(text: str) -> str:
    return "".join(f"\\{char}" if char in r"\`*_[]<>|#" else char for char in text)


def print_report(report: Report, out: Path, console: Console) -> None:
    """Shows the table on the screen."""
    table = Table("", "documents", "text", box=None, pad_edge=False)
    for what, documents, size in _rows(report.content):
        table.add_row(what, documents, size)
    console.print(table)
    console.print(_summary(report.content), soft_wrap=True)
    rate = human_bytes(report.content["bytes_in"] / max(report.wall_s, 1e-3))
    console.print(f"{out}: ready in {report.wall_s:.1f} s ({rate}/s); details in {out / 'report.md'}", soft_wrap=True)
