"""Preparation from text to shards: plan parts, clean, drop duplicates, train the tokenizer, encode, write the manifest.

Every stage leaves finished files with a marker, so a run that was killed goes on where it stopped and ends with the
same bytes as one that was not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.config.prepare import PrepareSection
from training.data.bpe import load_tokenizer, token_id, train_tokenizer
from training.data.files import sha256_of, write_atomically
from training.data.manifest import FILE_NAME, Manifest, ShardEntry, read_manifest, write_manifest
from training.data.progress import progress
from training.data.report import Report, build_report, write_report
from training.data.sources import Part, plan_parts
from training.data.stage_clean import CleanTask, clean_part
from training.data.stage_dedup import deduplicate
from training.data.stage_encode import (
    EncodeTask,
    encode_part,
    is_held_out,
    is_in_tokenizer_sample,
    surviving_documents,
    token_dtype,
    validation_documents,
    write_shards,
)
from training.data.workers import run_tasks, worker_count
from training.data.workfolder import WorkFolder, fingerprint_of
from training.errors import DataError, UsageError

TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True)
class Prepared:
    """A finished dataset: its manifest and the report on how it came about (None when it was there already)."""

    manifest: Manifest
    report: Report | None


def prepare(sources: Sequence[str], out: Path, settings: PrepareSection) -> Prepared:
    """Makes a dataset in folder `out` from `sources` (paths, or "demo").

    Doing it again with the same input and settings changes nothing. Raises UsageError for what cannot be read,
    DataError naming file and offset for damaged input, StorageError when `out` cannot be written.
    """
    started = time.monotonic()
    parts = plan_parts(sources, settings)
    fingerprint = _fingerprint(sources, parts, settings)
    if (out / FILE_NAME).exists():
        return Prepared(_finished(out, fingerprint), None)
    with WorkFolder(out).locked() as work:
        manifest, report = _run(sources, parts, settings, work, fingerprint)
    return Prepared(manifest, Report(report, time.monotonic() - started))


def _run(
    sources: Sequence[str], parts: list[Part], settings: PrepareSection, work: WorkFolder, fingerprint: str
) -> tuple[Manifest, dict[str, Any]]:
    out = work.out
    work.begin(fingerprint)
    workers = min(worker_count(settings.workers), len(parts))
    cleaned = _clean(parts, settings, work, workers)
    deduplicate(work, [counts["documents_out"] for counts in cleaned], settings.dedup)
    tokenizer = _tokenizer(work, cleaned, settings)
    encoded = _encode(cleaned, settings, work, tokenizer, workers)
    validation = write_shards(validation_documents(work, range(len(parts))), settings, out, "validation/all", tokenizer)
    train = [ShardEntry(**shard) for counts in encoded for shard in counts["shards"]]
    if not train:
        raise DataError(
            "the sources do not give a single training sequence",
            "add text, shorten the sequences, or see which rules drop it with fewer of them switched on",
        )
    splits = {"train": train, "validation": validation}
    manifest = _manifest(sources, settings, tokenizer, splits, fingerprint)
    report = build_report(work, cleaned, encoded, manifest)
    write_report(out, report)
    write_manifest(out, manifest)
    work.remove()
    return manifest, report


def _fingerprint(sources: Sequence[str], parts: list[Part], settings: PrepareSection) -> str:
    described = settings.model_dump(mode="json", exclude={"workers"})
    if settings.tokenizer != "train":
        path = Path(settings.tokenizer)
        load_tokenizer(path)
        described["tokenizer"] = sha256_of(path)
    return fingerprint_of([list(sources), described, [part.spans for part in parts]])


def _finished(out: Path, fingerprint: str) -> Manifest:
    manifest = read_manifest(out)
    if manifest.prepare.get("fingerprint") != fingerprint:
        raise UsageError(
            f"{out} holds a dataset made from other input or with other settings",
            "choose another --out, or remove this folder",
        )
    return manifest


def _clean(parts: list[Part], settings: PrepareSection, work: WorkFolder, workers: int) -> list[dict[str, Any]]:
    tasks = (CleanTask(part, settings, work) for part in parts)
    results: list[dict[str, Any]] = [{}] * len(parts)
    with progress("clean", sum(part.bytes for part in parts)) as advance:
        for part, counts in run_tasks(clean_part, tasks, workers):
            results[part.number] = counts
            advance(part.bytes)
    return results


def _tokenizer(work: WorkFolder, cleaned: list[dict[str, Any]], settings: PrepareSection) -> Path:
    """The tokenizer beside the shards: a copy of the one given, or one trained on a sample of the training text."""
    path = work.out / TOKENIZER_FILE
    if settings.tokenizer != "train":
        write_atomically(path, Path(settings.tokenizer).read_bytes())
        return path
    if path.exists() and work.dedup_done.exists() and (work.root / "tokenizer.done").exists():
        return path
    total = sum(counts["bytes_out"] for counts in cleaned)
    fraction = settings.tokenizer_sample_bytes / max(total, 1)
    with progress("train tokenizer", min(total, settings.tokenizer_sample_bytes)) as advance:

        def texts() -> Iterator[str]:
            for part in range(len(cleaned)):
                for document in surviving_documents(work, part):
                    held_out = is_held_out(document.hash, settings.validation_fraction)
                    if not held_out and is_in_tokenizer_sample(document.hash, fraction):
                        yield document.text
                        advance(len(document.text))

        tokenizer = train_tokenizer(texts(), settings.vocab_size, settings.begin_token, settings.pad_token)
    write_atomically(path, tokenizer.to_str(pretty=True).encode())
    write_atomically(work.root / "tokenizer.done", b"")
    return path


def _encode(
    cleaned: list[dict[str, Any]], settings: PrepareSection, work: WorkFolder, tokenizer: Path, workers: int
) -> list[dict[str, Any]]:
    tasks = (EncodeTask(part, settings, work, tokenizer) for part in range(len(cleaned)))
    results: list[dict[str, Any]] = [{}] * len(cleaned)
    with progress("encode", sum(counts["bytes_out"] for counts in cleaned)) as advance:
        for part, counts in run_tasks(encode_part, tasks, workers):
            results[part] = counts
            advance(cleaned[part]["bytes_out"])
    return results


def _manifest(
    sources: Sequence[str],
    settings: PrepareSection,
    tokenizer_path: Path,
    splits: dict[str, list[ShardEntry]],
    fingerprint: str,
) -> Manifest:
    tokenizer = load_tokenizer(tokenizer_path)
    special = {"begin": token_id(tokenizer, settings.begin_token, "begin_token")}
    if settings.packing == "best_fit":
        special["pad"] = token_id(tokenizer, settings.pad_token, "pad_token")
    vocab_size = tokenizer.get_vocab_size()
    return Manifest(
        format=settings.format,
        sequence_length=settings.sequence_length,
        token_dtype=token_dtype(vocab_size),
        vocab_size=vocab_size,
        tokenizer_sha256=sha256_of(tokenizer_path),
        tokenizer_file=TOKENIZER_FILE,
        special_tokens=special,
        splits=splits,
        prepare={
            "fingerprint": fingerprint,
            "sources": list(sources),
            "settings": settings.model_dump(mode="json", exclude={"workers"}),
        },
    )
