"""fab data.prepare, data.verify, data.inspect."""

from __future__ import annotations

from invoke import Collection, Context, task

from launch.tasks.exits import exits_cleanly


@task(
    iterable=["source", "set"],
    name="prepare",
    help={
        "source": "text file, folder, JSONL, Parquet or s3://; may be given several times",
        "out": "folder of the new dataset",
        "demo": "text of the Python installation",
        "format": "tfrecord or hdf5",
        "tokenizer": "a tokenizer.json, or train",
        "vocab-size": "entries of a trained tokenizer",
        "seq-len": "tokens a sequence",
        "workers": "processes",
        "config": "configuration with a prepare: section",
        "set": "override one key, for example --set prepare.dedup=false",
    },
)
@exits_cleanly
def data_prepare(
    c: Context,
    out: str,
    source: list[str] | None = None,
    demo: bool = False,
    format: str | None = None,  # noqa: A002
    tokenizer: str | None = None,
    vocab_size: int = 0,
    seq_len: int = 0,
    workers: int = 0,
    config: str | None = None,
    set: list[str] | None = None,  # noqa: A002
) -> int:
    """Make a dataset: clean, deduplicate, tokenise, pack, shard."""
    from launch.data import prepare

    return prepare(
        source or (), out, demo=demo, format=format, tokenizer=tokenizer, vocab_size=vocab_size or None,
        seq_len=seq_len or None, workers=workers or None, config=config, overrides=tuple(set or ()),
    )  # fmt: skip


@task(name="verify", help={"path": "folder of the dataset", "workers": "processes"})
@exits_cleanly
def data_verify(c: Context, path: str, workers: int = 0) -> int:
    """Check every shard and record of a dataset against its manifest; exit code 1 when something is wrong."""
    from launch.data import verify

    return verify(path, workers=workers or None)


@task(
    name="inspect",
    help={"path": "folder of the dataset", "index": "a sequence to show", "split": "train or validation"},
)
@exits_cleanly
def data_inspect(c: Context, path: str, index: int = -1, split: str | None = None) -> int:
    """Show statistics and decoded sequences of a dataset."""
    from launch.data import inspect

    return inspect(path, index=None if index < 0 else index, split=split)


collection = Collection("data", data_prepare, data_verify, data_inspect)
