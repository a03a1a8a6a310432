"""Ratios of the data room against its peers, all in one run on one core: `python benchmarks/data.py`.

Reading: the same tokens as TFRecord and HDF5 of Loopworks (checksums verified), as TFRecord through the PyPI package
`tfrecord` (which verifies nothing), as tar through `webdataset` and as MDS through `mosaicml-streaming`; in order,
and in random order where the peer can. Every reader hands over numpy arrays.

Preparing: the whole pipeline against a bare `encode_batch` of tokenizers on the same text, both on one core.

The best of some repetitions counts: other work on the machine can only make a number worse. A peer that is not
installed is left out and named.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from training.config.prepare import PrepareSection
from training.data import open_dataset
from training.data.formats import ShardLayout, get_format
from training.data.manifest import Manifest, ShardEntry, write_manifest

Rows = np.ndarray[Any, np.dtype[np.uint16]]
Read = Callable[[], int]
_BATCH = 16


def main() -> int:
    """Runs the benchmarks asked for and prints tables; --json also prints the figures."""
    parser = argparse.ArgumentParser(description="Ratios of the data room against its peers.")
    parser.add_argument("--only", choices=["read", "prepare"])
    parser.add_argument("--sequences", type=int, default=8000)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--text", action="append", metavar="PATH", help="text to prepare (default: the demo's)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    os.environ |= {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    print(f"commit {_commit()}, Python {platform.python_version()}, {_processor()}, one core")
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="loopworks-bench-") as folder:
        if options.only != "prepare":
            figures["read"] = read_benchmark(Path(folder), options.sequences, options.seq_len, options.repeat)
        if options.only != "read":
            figures["prepare"] = prepare_benchmark(Path(folder), options.text or ["demo"], options.repeat)
    if options.json:
        print(json.dumps(figures, indent=1))
    return 0


def read_benchmark(folder: Path, sequences: int, seq_len: int, repeat: int) -> dict[str, dict[str, float]]:
    """MB/s of token data of each reader, in order and at random."""
    rng = np.random.default_rng(0)
    rows: Rows = rng.integers(0, 65536, (sequences, seq_len + 1), dtype=np.uint16)
    order = rng.permutation(sequences)
    readers: dict[str, tuple[Read, Read | None]] = {}
    for name in ("tfrecord", "hdf5"):
        readers[f"loopworks {name}"] = ours(folder / name, rows, order, name)
    readers["loopworks tfrecord, no checksums"] = ours(folder / "off", rows, order, "tfrecord", verify=False)
    for name, make in (("tfrecord", pypi_tfrecord), ("webdataset", webdataset), ("streaming", mosaicml_streaming)):
        if importlib.util.find_spec(name) is None:
            print(f"{name} is not installed: left out")
            continue
        readers |= make(folder / f"peer-{name}", rows, order)
    figures = {name: {"sequential": 0.0, "random": 0.0} for name in readers}
    for _ in range(repeat):  # in turn, so that a busy moment of the machine does not hit one of them alone
        for name, pair in readers.items():
            for way, read in zip(figures[name], pair, strict=True):
                figures[name][way] = max(figures[name][way], _rate(read, rows))
    best = {way: figures["loopworks tfrecord"][way] for way in ("sequential", "random")}
    print(
        f"\n{sequences} sequences of {seq_len} + 1 tokens, {rows.nbytes / 1e6:.0f} MB; MB/s, and our TFRecord over it"
    )
    for name, found in figures.items():
        cells = (f"{found[w]:9.0f} {best[w] / found[w]:7.2f}x" if found[w] else f"{'-':>18}" for w in best)
        print(f"{name:34}", *cells)
    return figures


def _rate(read: Read | None, rows: Rows) -> float:
    """MB/s of processor time; 0 for what a peer cannot do."""
    if read is None:
        return 0.0
    started = time.process_time()
    count = read()
    seconds = time.process_time() - started
    assert count == len(rows), f"{count} of {len(rows)} sequences"
    return float(rows.nbytes / seconds / 1e6)


def ours(folder: Path, rows: Rows, order: Any, name: str, verify: bool = True) -> tuple[Read, Read]:
    """Our readers, through the dataset that training uses."""
    shard_format = get_format(name)
    (folder / "train").mkdir(parents=True)
    entries = []
    for number, part in enumerate(np.array_split(rows, 4)):
        file = f"train/{number:06d}{shard_format.suffix}"
        writer = shard_format.open_writer(folder / file, ShardLayout(rows.shape[1], "uint16"), {})
        writer.append(part)
        size, digest = writer.close()
        entries.append(ShardEntry(file, len(part), part.size, size, digest))
    (folder / "tokenizer.json").write_text("{}")
    digest = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    write_manifest(folder, Manifest(name, rows.shape[1] - 1, "uint16", 65536, digest, {"train": entries}))

    def in_order() -> int:
        dataset = open_dataset(folder, verify_checksums=verify)
        return sum(len(row) == rows.shape[1] for block in dataset.blocks() for row in block)

    def at_random() -> int:
        dataset = open_dataset(folder, verify_checksums=verify)
        batches = (dataset.read(order[start : start + _BATCH]) for start in range(0, len(order), _BATCH))
        return sum(len(row) == rows.shape[1] for block in batches for row in block)

    assert np.array_equal(open_dataset(folder).read(order[:50]), rows[order[:50]])
    return in_order, at_random


def pypi_tfrecord(folder: Path, rows: Rows, order: Any) -> dict[str, tuple[Read, Read | None]]:
    """The PyPI reader on our own file (bytes), and on one it wrote itself with int64 lists. It has no random access."""
    import tfrecord
    from tfrecord.reader import tfrecord_loader

    folder.mkdir()
    writer = get_format("tfrecord").open_writer(folder / "bytes", ShardLayout(rows.shape[1], "uint16"), {})
    writer.append(rows)
    writer.close()
    few = rows[: max(1, len(rows) // 10)]  # ten times slower to write and read
    theirs = tfrecord.TFRecordWriter(str(folder / "int64"))
    for row in few:
        theirs.write({"input_ids": (row.tolist(), "int")})
    theirs.close()

    def read_bytes() -> int:
        records = tfrecord_loader(str(folder / "bytes"), None, {"input_ids": "byte"})
        return sum(len(np.frombuffer(r["input_ids"], np.uint16)) == rows.shape[1] for r in records)

    def read_int64() -> int:
        records = tfrecord_loader(str(folder / "int64"), None, {"input_ids": "int"})
        return sum(len(r["input_ids"]) == rows.shape[1] for r in records)

    scaled = _rate(read_int64, few)
    print(f"tfrecord, PyPI, tokens as int64 lists: {scaled:.0f} MB/s of two-byte tokens")
    return {"tfrecord (PyPI), bytes": (read_bytes, None)}


def webdataset(folder: Path, rows: Rows, order: Any) -> dict[str, tuple[Read, Read | None]]:
    """webdataset on a tar of raw tokens. It has no random access."""
    import webdataset as wds

    folder.mkdir()
    with wds.TarWriter(str(folder / "a.tar")) as sink:
        for number, row in enumerate(rows):
            sink.write({"__key__": f"{number:08d}", "bin": row.tobytes()})

    def read() -> int:
        samples: Iterator[Any] = iter(wds.WebDataset(str(folder / "a.tar"), shardshuffle=False))
        return sum(len(np.frombuffer(sample["bin"], np.uint16)) == rows.shape[1] for sample in samples)

    return {"webdataset": (read, None)}


def mosaicml_streaming(folder: Path, rows: Rows, order: Any) -> dict[str, tuple[Read, Read | None]]:
    """MDS shards of mosaicml-streaming, local, without hashes, read by its shard reader."""
    from streaming import MDSWriter
    from streaming.base.format import reader_from_json

    with MDSWriter(out=str(folder), columns={"input_ids": f"ndarray:uint16:{rows.shape[1]}"}) as sink:
        for row in rows:
            sink.write({"input_ids": row})
    index = json.loads((folder / "index.json").read_text())

    def shards() -> list[Any]:
        return [reader_from_json(str(folder), None, entry) for entry in index["shards"]]

    ends = np.cumsum([entry["samples"] for entry in index["shards"]])

    def read(numbers: Any) -> int:
        opened = shards()
        places = np.searchsorted(ends, numbers, side="right")
        starts = np.concatenate(([0], ends))[places]
        pairs = zip(places.tolist(), (numbers - starts).tolist(), strict=True)
        return sum(len(opened[shard][number]["input_ids"]) == rows.shape[1] for shard, number in pairs)

    return {"mosaicml-streaming (MDS)": (lambda: read(np.arange(len(rows))), lambda: read(order))}


def prepare_benchmark(folder: Path, sources: list[str], repeat: int) -> dict[str, float]:
    """Seconds of the pipeline and of a bare encode_batch of the same text with the same tokenizer."""
    from tokenizers import Tokenizer

    from training.data.prepare import prepare
    from training.data.sources import plan_parts, read_part

    settings = PrepareSection(vocab_size=4096, sequence_length=512, workers=1)
    prepare(sources, folder / "tokenizer", settings)
    file = folder / "tokenizer" / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    parts = plan_parts(sources, settings)
    texts = [document.text for part in parts for document in read_part(part, settings, folder)]
    size = sum(len(text.encode()) for text in texts)
    given = settings.model_copy(update={"tokenizer": str(file)})
    variants = {
        "every step, all text kept": given.model_copy(update=_keep_everything()),
        "every step, rules as they are": given,
    }
    runs: dict[str, Callable[[int], object]] = {"bare encode_batch": lambda number: tokenizer.encode_batch(texts)}
    for place, (name, chosen) in enumerate(variants.items()):
        runs[name] = lambda number, p=place, c=chosen: prepare(sources, folder / f"{p}-{number}", c)  # type: ignore[misc]
    seconds = {name: float("inf") for name in runs}
    for number in range(repeat):  # in turn, so that a busy moment of the machine does not hit one of them alone
        for name, run in runs.items():
            seconds[name] = min(seconds[name], _cpu_seconds(lambda r=run, n=number: r(n)))
    bare = seconds["bare encode_batch"]
    print(f"\npreparing {size / 1e6:.1f} MB of text, vocabulary {tokenizer.get_vocab_size()}; seconds of one core")
    for name, found in seconds.items():
        print(f"{name:32} {found:6.2f} s  {size / found / 1e6:5.2f} MB/s  {found / bare:.2f}x")
    return {"text_bytes": float(size), **seconds}


def _keep_everything() -> dict[str, Any]:
    """Limits that nothing exceeds: each rule is computed to its end, and all text is encoded like in the bare run."""
    from training.config.prepare import GopherQualitySection, GopherRepetitionSection

    quality = GopherQualitySection(
        min_doc_words=0,
        max_doc_words=10**9,
        min_avg_word_length=0.01,
        max_avg_word_length=1e6,
        max_symbol_word_ratio=1.0,
        max_bullet_lines_ratio=1.0,
        max_ellipsis_lines_ratio=1.0,
        min_alpha_words_ratio=0.0,
        min_stop_words=0,
    )
    grams = {name: field.default for name, field in GopherRepetitionSection.model_fields.items() if "grams" in name}
    loose = {name: tuple((n, 1.0) for n, _ in limits) for name, limits in grams.items()}
    fractions = {
        name: 1.0 for name in GopherRepetitionSection.model_fields if name.startswith("dup_") and "frac" in name
    }
    return {"quality": quality, "repetition": GopherRepetitionSection.model_validate({**loose, **fractions})}


def _cpu_seconds(action: Callable[[], Any]) -> float:
    """Processor time of an action that runs in this process alone, without its progress lines."""
    screen, sys.stderr = sys.stderr, io.StringIO()
    started = time.process_time()
    try:
        action()
    finally:
        sys.stderr = screen
    return time.process_time() - started


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
    )
    return done.stdout.strip() or "unknown"


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    sys.exit(main())
