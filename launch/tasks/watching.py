"""fab monitor and fab report."""

from __future__ import annotations

from invoke import Context, task

from launch.tasks.exits import exits_cleanly


@task(
    iterable=["dir"],
    help={
        "dir": "folder of runs (default: runs); may be given several times",
        "state": "folder of its own data (default: DIR/.monitor)",
        "port-base": "first of five ports (default: 9090, 9093, 9402, 3000, 8888)",
        "drain": "what an alert that asks for a drain does: list, slurm or kubernetes",
        "receiver-only": "start no programs: receive alerts and serve the state of the runs, on the third port",
    },
)
@exits_cleanly
def monitor(
    c: Context,
    dir: list[str] | None = None,  # noqa: A002
    state: str | None = None,
    port_base: int = 0,
    drain: str = "list",
    receiver_only: bool = False,
) -> None:
    """Start Prometheus and Alertmanager (and Grafana where there is one) over the runs; Ctrl-C ends them."""
    from launch.monitor import check_drainer, monitor_layout, run_monitor
    from launch.receiver import run_receiver

    run = run_receiver if receiver_only else run_monitor
    run(monitor_layout(dir or ["runs"], state, port_base or None), check_drainer(drain))


@task(
    help={
        "run": "name of the run (default: the newest)",
        "out": "file (default: report.html in the run's folder)",
        "dir": "folder of the runs",
        "prometheus": "address of a Prometheus that watched the run (default: that of a running fab monitor)",
    }
)
@exits_cleanly
def report(
    c: Context,
    run: str | None = None,
    out: str | None = None,
    dir: str = "runs",  # noqa: A002
    prometheus: str | None = None,
) -> None:
    """Write one self-contained HTML page about a run."""
    from launch.report import write_report
    from launch.runs import find_run

    print(write_report(find_run(dir, run), out, prometheus))
