"""What `fab monitor` writes and starts, derived from the files in monitoring/, which a cluster uses as they are.

Only ports, paths and the interval change. Pure functions from a layout to texts and command lines, and one that writes.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from launch.errors import UsageError
from training.records import RunFolder

CHECKOUT = Path(__file__).resolve().parent.parent
MONITORING = CHECKOUT / "monitoring"
FOLDERS = (
    *("prometheus", "alertmanager", "logs", "targets/node", "targets/gpu"),
    *("provisioning/datasources", "provisioning/dashboards"),
)
ALLOW_LOOPBACK = "allow 127.0.0.1;\n"


@dataclass(frozen=True)
class Ports:
    """Where each part listens, on loopback."""

    prometheus: int = 9090
    alertmanager: int = 9093
    control: int = 9402
    grafana: int = 3000
    web: int = 8888


@dataclass(frozen=True)
class Layout:
    """Where monitoring reads and writes."""

    runs_dir: Path
    state_dir: Path
    ports: Ports = field(default_factory=Ports)
    rules: Path = MONITORING / "rules"
    scrape_interval: str = "5s"
    retention: str = "30d"
    other_runs_dirs: tuple[Path, ...] = ()

    @property
    def runs_dirs(self) -> tuple[Path, ...]:
        """All folders of runs."""
        return (self.runs_dir, *self.other_runs_dirs)

    @property
    def prometheus_url(self) -> str:
        """Address of Prometheus."""
        return f"http://127.0.0.1:{self.ports.prometheus}/prometheus"


@dataclass(frozen=True)
class Program:
    """A program to start: `ready` is an address that answers once it works, empty when nothing tells."""

    name: str
    argv: tuple[str, ...]
    ready: str
    env: dict[str, str] = field(default_factory=dict)


def cluster_of(folder: RunFolder) -> str:
    """Returns monitoring.cluster of a run; `local` where its configuration does not say."""
    for line in folder.config.read_text(encoding="utf-8").splitlines() if folder.config.is_file() else ():
        if line.startswith("  cluster: "):
            return line.split(": ", 1)[1].strip("'\" ")
    return "local"


def local_config(base: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """Returns the Prometheus configuration for this machine: that of a cluster with other paths, ports and interval."""
    config = copy.deepcopy(base)
    config["global"].update(
        scrape_interval=layout.scrape_interval,
        evaluation_interval=layout.scrape_interval,
        scrape_timeout=layout.scrape_interval,
    )
    config["rule_files"] = [str(layout.rules / "*.yml")]
    config["alerting"]["alertmanagers"] = [
        {"static_configs": [{"targets": [f"127.0.0.1:{layout.ports.alertmanager}"]}]}
    ]
    targets = {"training": [runs_dir / ".targets" for runs_dir in layout.runs_dirs]}
    for job in config["scrape_configs"]:
        name = job["job_name"]
        if "file_sd_configs" in job:
            folders = targets.get(name, [layout.state_dir / "targets" / name])
            files = [str(folder / "*.json") for folder in folders]
            job["file_sd_configs"] = [{"files": files, "refresh_interval": "5s"}]
        if name == "control":
            del job["file_sd_configs"]
            job["static_configs"] = [{"targets": [f"127.0.0.1:{layout.ports.control}"]}]
        if name == "prometheus":
            job["static_configs"] = [{"targets": [f"127.0.0.1:{layout.ports.prometheus}"]}]
    return config


def local_alertmanager(base: str, layout: Layout) -> str:
    """Returns the Alertmanager configuration with this machine's webhook, and nothing is held back."""
    config = yaml.safe_load(base.replace("http://127.0.0.1:9402/", f"http://127.0.0.1:{layout.ports.control}/"))
    config["route"].update(group_wait=layout.scrape_interval, group_interval=layout.scrape_interval)
    return yaml.safe_dump(config, sort_keys=False)


def local_nginx(server: str, layout: Layout) -> str:
    """Returns a whole nginx configuration around monitoring/nginx/loopworks.conf, for a user without rights."""
    ports = layout.ports
    server = server.replace("listen 8888;", f"listen 127.0.0.1:{ports.web};")
    server = server.replace("127.0.0.1:3000", f"127.0.0.1:{ports.grafana}")
    server = server.replace("127.0.0.1:9090", f"127.0.0.1:{ports.prometheus}")
    state = layout.state_dir
    temporary = " ".join(
        f"{kind}_temp_path {state}/nginx-{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    return (
        f"daemon off; worker_processes 1; pid {state}/nginx.pid; error_log stderr;\n"
        "events { worker_connections 256; }\n"
        f"http {{\naccess_log off; proxy_max_temp_file_size 0; {temporary}\n{server}}}\n"
    )


def programs(layout: Layout, found: Callable[[str], str | None] = shutil.which) -> list[Program]:
    """Returns what to start. Raises UsageError when Prometheus or Alertmanager is not installed."""
    prometheus, alertmanager = found("prometheus"), found("prometheus-alertmanager")
    if prometheus is None or alertmanager is None:
        raise UsageError(
            "Prometheus and Alertmanager are not installed",
            "as root on Debian or Ubuntu: apt install prometheus prometheus-alertmanager; without them, fab report "
            "makes a page of a run",
        )
    state, ports = layout.state_dir, layout.ports
    started = [
        Program(
            "alertmanager",
            (
                *(alertmanager, f"--config.file={state}/alertmanager.yml", f"--storage.path={state}/alertmanager"),
                *(f"--web.listen-address=127.0.0.1:{ports.alertmanager}", "--cluster.listen-address="),
            ),
            f"http://127.0.0.1:{ports.alertmanager}/-/ready",
        ),
        Program(
            "prometheus",
            (
                *(prometheus, f"--config.file={state}/prometheus.yml", f"--storage.tsdb.path={state}/prometheus"),
                *(f"--web.listen-address=127.0.0.1:{ports.prometheus}", f"--web.external-url={layout.prometheus_url}/"),
                f"--storage.tsdb.retention.time={layout.retention}",
            ),
            f"{layout.prometheus_url}/-/ready",
        ),
    ]
    grafana, nginx = found("grafana-server"), found("nginx") or found("/usr/sbin/nginx")
    if grafana is not None:
        started.append(grafana_program(grafana, layout))
    if nginx is not None:
        argv = (nginx, "-p", str(state), "-c", f"{state}/nginx.conf", "-e", "stderr")
        started.append(Program("nginx", argv, f"http://127.0.0.1:{ports.web}/healthz"))
    return started


def grafana_program(binary: str, layout: Layout) -> Program:
    """Returns Grafana with data source and dashboards provisioned, on loopback, readable without a login."""
    state = layout.state_dir
    env = {
        "GF_SERVER_HTTP_ADDR": "127.0.0.1",
        "GF_SERVER_HTTP_PORT": str(layout.ports.grafana),
        "GF_PATHS_DATA": f"{state}/grafana",
        "GF_PATHS_PROVISIONING": f"{state}/provisioning",
        "GF_AUTH_ANONYMOUS_ENABLED": "true",
        "GF_ANALYTICS_REPORTING_ENABLED": "false",
        "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
    }
    home = "/usr/share/grafana"
    return Program(
        "grafana", (binary, f"--homepath={home}"), f"http://127.0.0.1:{layout.ports.grafana}/api/health", env
    )


def write_files(layout: Layout) -> None:
    """Writes what the programs read. Raises UsageError when the folder cannot be written."""
    state = layout.state_dir
    try:
        for name in FOLDERS:
            (state / name).mkdir(parents=True, exist_ok=True)
        # Prometheus notices new entries at once only in folders that were there when it started.
        for runs_dir in layout.runs_dirs:
            (runs_dir / ".targets").mkdir(parents=True, exist_ok=True)
        base = yaml.safe_load((MONITORING / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
        files = {"prometheus.yml": yaml.safe_dump(local_config(base, layout), sort_keys=False)}
        alertmanager = (MONITORING / "alertmanager" / "alertmanager.yml").read_text(encoding="utf-8")
        files["alertmanager.yml"] = local_alertmanager(alertmanager, layout)
        files["nginx.conf"] = local_nginx((MONITORING / "nginx" / "loopworks.conf").read_text(encoding="utf-8"), layout)
        files["loopworks-allow.conf"] = ALLOW_LOOPBACK
        provisioning = MONITORING / "grafana" / "provisioning"
        source = (provisioning / "datasources" / "prometheus.yml").read_text(encoding="utf-8")
        files["provisioning/datasources/prometheus.yml"] = source.replace(
            "http://127.0.0.1:9090/prometheus", layout.prometheus_url
        )
        boards = (provisioning / "dashboards" / "loopworks.yml").read_text(encoding="utf-8")
        files["provisioning/dashboards/loopworks.yml"] = boards.replace(
            "/etc/grafana/loopworks-dashboards", str(MONITORING / "dashboards")
        )
        for name, text in files.items():
            (state / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot write {error.filename or state}: {error.strerror}", "free space, or name another --state"
        ) from None
