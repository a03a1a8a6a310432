"""fab checkpoints, checkpoints.fetch, checkpoints.prune."""

from __future__ import annotations

from invoke import Collection, Context, task

from launch.tasks.exits import exits_cleanly


@task(
    name="list",
    default=True,
    help={
        "run": "name of the run (default: the newest)",
        "verify": "read every file and compare its sha256",
        "dir": "folder of the runs",
        "json": "print JSON",
    },
)
@exits_cleanly
def checkpoints_list(
    c: Context,
    run: str | None = None,
    verify: bool = False,
    dir: str = "runs",
    json: bool = False,  # noqa: A002
) -> int:
    """List the checkpoints of a run: step, age, size, ranks, state, place. Exit code 1 when one is damaged."""
    from launch.checkpoints import list_checkpoints
    from launch.present import print_checkpoints, print_json
    from launch.runs import find_run

    listing = list_checkpoints(find_run(dir, run), deep=verify)
    if json:
        print_json({"run": listing.run, "rows": [row.as_json() for row in listing.rows], "notes": listing.notes})
    else:
        print_checkpoints(listing)
    return 0 if listing.all_sound else 1


@task(
    name="fetch",
    help={"run": "name of the run", "step": "which one (default: the newest)", "dir": "folder of the runs"},
)
@exits_cleanly
def checkpoints_fetch(c: Context, run: str | None = None, step: int = 0, dir: str = "runs") -> None:  # noqa: A002
    """Fetch a checkpoint from the object store and verify it."""
    from launch.checkpoints import fetch_checkpoint
    from launch.runs import find_run

    print(fetch_checkpoint(find_run(dir, run), step or None))


@task(
    name="prune",
    help={
        "run": "name of the run",
        "keep-last": "how many stay (default: the run's rule)",
        "dry-run": "only say what would go",
        "dir": "folder of the runs",
    },
)
@exits_cleanly
def checkpoints_prune(
    c: Context,
    run: str | None = None,
    keep_last: int = 0,
    dry_run: bool = False,
    dir: str = "runs",  # noqa: A002
) -> None:
    """Remove checkpoints that the retention rule does not keep."""
    from launch.checkpoints import prune_checkpoints
    from launch.runs import find_run

    removed = prune_checkpoints(find_run(dir, run), keep_last=keep_last or None, dry_run=dry_run)
    for step, reason in removed:
        print(f"{'would remove' if dry_run else 'removed'} step {step}: {reason}")
    if not removed:
        print("nothing to remove")


collection = Collection("checkpoints", checkpoints_list, checkpoints_fetch, checkpoints_prune)
