"""fab export and fab import."""

from __future__ import annotations

from invoke import Context, task

from launch.tasks.exits import exits_cleanly


@task(
    name="export",
    help={
        "run": "name of the run (default: the newest)",
        "format": "safetensors, or hf: names and keys of the public reference model",
        "to": "new folder",
        "dtype": "float32, bfloat16 or float16",
        "dir": "folder of the runs",
        "json": "print JSON",
    },
)
@exits_cleanly
def export_weights(
    c: Context,
    to: str,
    run: str | None = None,
    format: str = "safetensors",  # noqa: A002
    dtype: str = "float32",
    dir: str = "runs",  # noqa: A002
    json: bool = False,
) -> int:
    """Write the weights of a run's newest checkpoint for other programs."""
    from launch.observe import export
    from launch.runs import find_run

    return export(find_run(dir, run), to, format, dtype, json)


@task(
    name="import",
    iterable=["set"],
    help={
        "source": "folder of exported weights, or of a checkpoint of the public reference model",
        "to": "configuration file to write",
        "set": "override one key of it",
    },
)
@exits_cleanly
def import_weights(c: Context, source: str, to: str, set: list[str] | None = None) -> None:  # noqa: A002
    """Write a configuration for a run that starts from such weights."""
    from launch.importing import write_configuration

    print(f"wrote {write_configuration(source, to, tuple(set or ()))}; start it by: fab train --config {to}")
