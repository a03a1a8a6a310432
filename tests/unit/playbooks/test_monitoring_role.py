"""Files that a cluster's monitoring gets beyond those of the checkout."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import jinja2
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
ROLE = ROOT / "playbooks/roles/monitoring"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("loaded_targets", ROLE / "filter_plugins/targets.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


watching_runs = load().watching_runs
merged_rules = load().merged_rules


def render(name: str, **values: object) -> str:
    environment = jinja2.Environment(trim_blocks=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    environment.filters["to_json"] = json.dumps
    environment.filters["node_address"] = lambda variables, name: variables.get("loopworks_private_ip", name)
    return environment.from_string((ROLE / "templates" / name).read_text()).render(values)


def test_prometheus_reads_the_targets_of_runs_and_nothing_else_changes() -> None:
    text = (ROOT / "monitoring/prometheus/prometheus.yml").read_text()
    before, after = yaml.safe_load(text), yaml.safe_load(watching_runs(text, ["/shared/runs/", "/other"]))
    jobs = {job["job_name"]: job for job in after["scrape_configs"]}
    files = jobs["training"]["file_sd_configs"][0].pop("files")
    assert files == ["targets/training/*.json", "/shared/runs/.targets/*.json", "/other/.targets/*.json"]
    next(job for job in before["scrape_configs"] if job["job_name"] == "training")["file_sd_configs"][0].pop("files")
    assert before == after


def test_another_shape_of_the_configuration_is_said() -> None:
    with pytest.raises(ValueError, match="job training"):
        watching_runs("scrape_configs: []\n", ["/shared/runs"])


def test_rules_in_one_file_are_those_of_all() -> None:
    texts = [path.read_text() for path in sorted((ROOT / "monitoring/rules").glob("*.yml"))]
    groups = [group for text in texts for group in yaml.safe_load(text)["groups"]]
    assert yaml.safe_load(merged_rules(texts)) == {"groups": groups}
    assert len({group["name"] for group in groups}) == len(groups)
    with pytest.raises(ValueError, match="does not begin with groups"):
        merged_rules(["rules: []\n"])


@pytest.mark.parametrize("count", [0, 1, 512])
def test_targets_are_one_file_for_all_nodes(count: int) -> None:
    names = [f"gpu{i:03}" for i in range(count)]
    hostvars = {name: {"loopworks_private_ip": f"10.0.{i // 250}.{i % 250}"} for i, name in enumerate(names)}
    text = render("targets.json.j2", item={"names": names, "port": 9100}, hostvars=hostvars, loopworks_cluster="lab")
    entries = json.loads(text)
    assert [entry["labels"]["node"] for entry in entries] == names
    assert len({entry["targets"][0] for entry in entries}) == count
    assert len(text) < 110 * count + 10


def test_nginx_lets_in_who_is_listed() -> None:
    text = render(
        "nginx-allow.conf.j2", loopworks_cluster_cidrs=["10.20.0.0/16"], loopworks_allowed_cidrs=["10.1.0.0/16"]
    )
    allowed = [line for line in text.splitlines() if line.startswith("allow")]
    assert allowed == ["allow 127.0.0.1;", "allow ::1;", "allow 10.20.0.0/16;", "allow 10.1.0.0/16;"]


def test_what_serves_metrics_listens_on_loopback_or_the_private_address() -> None:
    prometheus = render("prometheus.j2", monitoring_retention="90d", monitoring_retention_size="")
    assert "--web.listen-address=127.0.0.1:9090" in prometheus and "retention.size" not in prometheus
    assert "retention.size=9GB" in render("prometheus.j2", monitoring_retention="1d", monitoring_retention_size="9GB")
    assert "=127.0.0.1:9093" in render("prometheus-alertmanager.j2")
    exporter = render(
        "node-exporter.j2", loopworks_private_ip="10.0.0.1", monitoring_node_port=9100, monitoring_textfile_dir="/t"
    )
    assert "--web.listen-address=10.0.0.1:9100 --collector.textfile.directory=/t" in exporter


def test_dcgm_exporter_ends_and_starts_with_the_host_engine() -> None:
    text = render(
        "dcgm.service.j2",
        monitoring_dcgm_program="/usr/bin/dcgm-exporter",
        loopworks_private_ip="10.0.0.1",
        monitoring_dcgm_port=9400,
    )
    assert "PartOf=nvidia-dcgm.service" in text and "Restart=always" in text
    assert "--address=10.0.0.1:9400" in text
