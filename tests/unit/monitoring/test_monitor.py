"""What `fab monitor` writes and starts, and what it tells of the runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from launch.errors import UsageError
from launch.monitor import Monitor, check_drainer, monitor_layout
from launch.monitor_files import (
    MONITORING,
    Layout,
    Ports,
    grafana_program,
    local_alertmanager,
    local_config,
    local_nginx,
    programs,
    write_files,
)
from tests.unit.monitoring.tools import known_series, needs

BASE = yaml.safe_load((MONITORING / "prometheus" / "prometheus.yml").read_text())


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "runs", tmp_path / "state", Ports(1, 2, 3, 4, 5))


def test_only_paths_ports_and_intervals_differ_from_a_clusters(layout: Layout) -> None:
    config = local_config(BASE, layout)
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    assert jobs["training"]["file_sd_configs"][0]["files"] == [str(layout.runs_dir / ".targets" / "*.json")]
    assert jobs["control"]["static_configs"] == [{"targets": ["127.0.0.1:3"]}]
    assert config["rule_files"] == [str(MONITORING / "rules" / "*.yml")]
    for before in BASE["scrape_configs"]:
        after = jobs[before["job_name"]]
        for key in ("relabel_configs", "metric_relabel_configs", "sample_limit", "label_limit", "honor_labels"):
            assert after.get(key) == before.get(key)


def test_a_label_that_grows_is_refused_in_every_job() -> None:
    assert all("sample_limit" in job for job in BASE["scrape_configs"] if "file_sd_configs" in job)


def test_what_node_exporter_says_is_kept_when_a_rule_or_panel_needs_it() -> None:
    import re

    (job,) = [job for job in BASE["scrape_configs"] if job["job_name"] == "node"]
    keep = re.compile(job["metric_relabel_configs"][0]["regex"])
    assert job["metric_relabel_configs"][0]["action"] == "keep"
    wanted = [name for name in known_series() if name.startswith(("node_", "loopworks_"))]
    assert all(keep.fullmatch(name) for name in wanted)
    assert not keep.fullmatch("node_scrape_collector_duration_seconds")


@needs("promtool", "amtool", "prometheus", "prometheus-alertmanager")
def test_the_tools_accept_what_is_written(layout: Layout) -> None:
    write_files(layout)
    for command in (
        ["promtool", "check", "config", str(layout.state_dir / "prometheus.yml")],
        ["amtool", "check-config", str(layout.state_dir / "alertmanager.yml")],
        ["promtool", "check", "config", "--syntax-only", str(MONITORING / "prometheus" / "prometheus.yml")],
    ):
        outcome = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        assert outcome.returncode == 0, outcome.stdout + outcome.stderr


def test_the_webhook_of_the_local_alertmanager_is_ours(layout: Layout) -> None:
    text = local_alertmanager((MONITORING / "alertmanager" / "alertmanager.yml").read_text(), layout)
    assert "http://127.0.0.1:3/actions" in text
    assert "9402" not in text


def test_nginx_listens_on_loopback_alone(layout: Layout) -> None:
    text = local_nginx((MONITORING / "nginx" / "loopworks.conf").read_text(), layout)
    assert "listen 127.0.0.1:5;" in text
    assert "proxy_pass http://127.0.0.1:1;" in text
    assert "deny all;" in text


def test_grafana_gets_its_boards_and_stays_on_loopback(layout: Layout) -> None:
    write_files(layout)
    program = grafana_program("/usr/sbin/grafana-server", layout)
    assert program.env["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    source = yaml.safe_load((layout.state_dir / "provisioning" / "datasources" / "prometheus.yml").read_text())
    assert source["datasources"][0]["url"] == "http://127.0.0.1:1/prometheus"
    assert source["datasources"][0]["uid"] == "loopworks-prometheus"
    boards = yaml.safe_load((layout.state_dir / "provisioning" / "dashboards" / "loopworks.yml").read_text())
    assert list(Path(boards["providers"][0]["options"]["path"]).glob("*.json"))


def test_each_program_listens_on_loopback(layout: Layout) -> None:
    started = programs(layout, found=lambda name: f"/usr/bin/{name}")
    assert [program.name for program in started] == ["alertmanager", "prometheus", "grafana", "nginx"]
    for program in started:
        assert "127.0.0.1" in program.ready
        assert not any("0.0.0.0" in argument for argument in program.argv)


def test_without_prometheus_it_says_how_to_have_it(layout: Layout) -> None:
    with pytest.raises(UsageError, match="fab report") as caught:
        programs(layout, found=lambda _: None)
    assert caught.value.exit_code == 2


def test_a_port_in_use_is_named_before_anything_starts(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        layout = Layout(tmp_path / "runs", tmp_path / "state", Ports(prometheus=port))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("launch.monitor.programs", lambda _: [])
            patch.setattr("launch.served.ANSWER_TIMEOUT_S", 0.1)
            with pytest.raises(UsageError, match=str(port)), Monitor(layout):
                pass
    assert not layout.state_dir.exists()


@pytest.mark.parametrize("base", [80, 65533, -1])
def test_a_port_base_that_cannot_be(base: int) -> None:
    with pytest.raises(UsageError, match="--port-base"):
        monitor_layout(["runs"], None, base)


def test_ports_follow_the_base(tmp_path: Path) -> None:
    assert monitor_layout([str(tmp_path)], None, 19000).ports == Ports(19000, 19001, 19002, 19003, 19004)
    assert monitor_layout([str(tmp_path)], None, None).ports == Ports()
    assert monitor_layout([str(tmp_path)], None, None).state_dir == tmp_path / ".monitor"


def test_ways_to_drain() -> None:
    assert check_drainer("slurm") == "slurm"
    with pytest.raises(UsageError, match="kubernetes"):
        check_drainer("reboot")
