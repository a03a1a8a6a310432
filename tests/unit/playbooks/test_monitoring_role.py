"""Files that a cluster's monitoring gets beyond those of the checkout."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import jinja2
import pytest
import yaml

from tests.unit.monitoring.tools import needs
from tests.unit.playbooks.plugins import load

ROOT = Path(__file__).resolve().parents[3]
ROLE = ROOT / "playbooks/roles/monitoring"


targets = load("roles/monitoring/filter_plugins/targets.py")
watching_runs, merged_rules, finding_elastic_nodes = (
    targets.watching_runs,
    targets.merged_rules,
    targets.finding_elastic_nodes,
)
PROMETHEUS = (ROOT / "monitoring/prometheus/prometheus.yml").read_text()
ELASTIC = {"cluster": "lab", "region": "eu-west-1", "group": "lab-elastic-1f", "ports": {"node": 9100, "gpu": 9400}}


def render(name: str, **values: object) -> str:
    environment = jinja2.Environment(trim_blocks=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    environment.filters["to_json"] = json.dumps
    environment.filters["quote"] = shlex.quote
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


def test_elastic_nodes_are_asked_for_and_the_files_remain() -> None:
    before, after = yaml.safe_load(PROMETHEUS), yaml.safe_load(finding_elastic_nodes(PROMETHEUS, ELASTIC))
    for old, new in zip(before["scrape_configs"], after["scrape_configs"], strict=True):
        asked = new.pop("ec2_sd_configs", [])
        if old["job_name"] not in ("node", "gpu"):
            assert not asked and new == old
            continue
        (question,) = asked
        assert (question["region"], question["port"]) == ("eu-west-1", {"node": 9100, "gpu": 9400}[new["job_name"]])
        assert {entry["name"]: entry["values"] for entry in question["filters"]} == {
            "tag:aws:autoscaling:groupName": ["lab-elastic-1f"],
            "instance-state-name": ["running"],
        }
        names = new["relabel_configs"][:2]
        assert {(rule["target_label"], rule["replacement"]) for rule in names} == {
            ("node", "lab-elastic-$1"),
            ("cluster", "lab"),
        }
        # Only instances have this label: what files say stays.
        assert all(rule["source_labels"] == ["__meta_ec2_instance_id"] for rule in names)
        # Before the rule that makes instance of node.
        del new["relabel_configs"][:2]
        assert new == old


def test_without_a_group_nothing_is_asked_for() -> None:
    assert finding_elastic_nodes(PROMETHEUS, {}) == PROMETHEUS
    with pytest.raises(ValueError, match="job node"):
        finding_elastic_nodes("scrape_configs: []\n", ELASTIC)


def test_elastic_nodes_that_are_found_stand_in_no_file_of_targets(tmp_path: Path) -> None:
    """As Ansible sees it: on AWS they come from EC2, on machines of one's own from the inventory."""
    hosts = {name: {"ansible_connection": "local"} for name in ("h", "g1", "e1")}
    variables = {"loopworks_elastic_group": "g", "loopworks_region": "r", "loopworks_cluster": "lab"}
    groups = {"head": ["h"], "gpu_nodes": ["g1", "e1"], "elastic": ["e1"]}
    children = {group: {"hosts": {name: hosts[name] for name in names}} for group, names in groups.items()}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"all": {"vars": variables, "children": children}}))
    ports = "{{ __monitoring_elastic.ports | default({}) }}"
    message = "{{ loopworks_provider }} {{ __monitoring_hosts }} {{ __monitoring_gpu_hosts }} " + ports
    play = {
        "hosts": "h",
        "gather_facts": False,
        "vars_files": [str(ROLE / "defaults/main.yml"), str(ROLE / "vars/main.yml")],
        "tasks": [
            {
                "debug": {"msg": message},
                "loop": ["aws", "private"],
                "loop_control": {"loop_var": "loopworks_provider"},
            }
        ],
    }
    (tmp_path / "play.yml").write_text(yaml.safe_dump([play]))
    command = [sys.executable, "-m", "ansible.cli.playbook", "-i", "hosts.yml", "play.yml"]
    environment = {**os.environ, "ANSIBLE_HOME": str(tmp_path), "ANSIBLE_LOCAL_TEMP": str(tmp_path)}
    outcome = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert "aws ['g1', 'h'] [] {'node': 9100, 'gpu': 9400}" in outcome.stdout
    assert "private ['e1', 'g1', 'h'] [] {}" in outcome.stdout


@needs("promtool")
def test_promtool_accepts_the_question(tmp_path: Path) -> None:
    (tmp_path / "rules").symlink_to(ROOT / "monitoring/rules")
    file = tmp_path / "prometheus.yml"
    file.write_text(watching_runs(finding_elastic_nodes(PROMETHEUS, ELASTIC), ["/shared/runs"]))
    command = ["promtool", "check", "config", str(file)]
    outcome = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


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


@pytest.mark.parametrize("drain", ["list", "slurm"])
def test_the_receiver_of_alerts_has_no_rights_but_those_of_the_account(drain: str) -> None:
    text = render(
        "alerts.service.j2",
        loopworks_user="loopworks",
        loopworks_prefix="/opt/loopworks",
        monitoring_drain=drain,
        monitoring_runs_dirs=["/shared/runs", "/my data/runs"],
        __monitoring_fab="/opt/loopworks/venv/bin/fab",
        __monitoring_source={"stat": {"exists": True, "lnk_source": "/opt/loopworks/source/12ab"}},
    )
    unit = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    assert unit["User"] == "loopworks"
    assert unit["ExecStart"] == (
        f"/opt/loopworks/venv/bin/fab monitor --receiver-only --drain {drain} --state /var/lib/loopworks-alerts"
        " --dir /shared/runs --dir '/my data/runs'"
    )
    # Another version of the project is another unit, which is started again.
    assert unit["WorkingDirectory"] == "/opt/loopworks/source/12ab"
    assert unit["CapabilityBoundingSet"] == ""
    # scontrol and kubectl talk to other machines.
    assert ("IPAddressDeny" in unit) == (drain == "list")


def test_prometheus_finds_the_receiver_where_alertmanager_does() -> None:
    (entry,) = json.loads(render("control.json.j2", loopworks_cluster="lab"))
    assert entry == {"targets": ["127.0.0.1:9402"], "labels": {"cluster": "lab"}}
    receivers = yaml.safe_load((ROOT / "monitoring/alertmanager/alertmanager.yml").read_text())["receivers"]
    urls = [hook["url"] for receiver in receivers for hook in receiver.get("webhook_configs", [])]
    assert {url.rsplit("/", 1)[0] for url in urls} == {"http://127.0.0.1:9402"}


def test_dcgm_exporter_ends_and_starts_with_the_host_engine() -> None:
    text = render(
        "dcgm.service.j2",
        monitoring_dcgm_program="/usr/bin/dcgm-exporter",
        loopworks_private_ip="10.0.0.1",
        monitoring_dcgm_port=9400,
    )
    assert "PartOf=nvidia-dcgm.service" in text and "Restart=always" in text
    assert "--address=10.0.0.1:9400" in text
