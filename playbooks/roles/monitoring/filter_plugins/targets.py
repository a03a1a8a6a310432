"""What Prometheus reads on a cluster, made of the files in the checkout."""

from __future__ import annotations

import json
import re
from typing import Any

# One line: `files: [targets/training/*.json]`.
_TRAINING = re.compile(r"^(?P<before>.*files: \[)(?P<file>targets/training/\*\.json)(?P<after>\].*)$", re.MULTILINE)


_DISCOVERY = """\
    ec2_sd_configs:
      - region: {region}
        port: {port}
        refresh_interval: 60s
        filters:
          - {{name: "tag:aws:autoscaling:groupName", values: [{group}]}}
          - {{name: instance-state-name, values: [running]}}
"""
_ELASTIC_LABELS = """\
      - {{source_labels: [__meta_ec2_instance_id], regex: i-(.+), target_label: node, replacement: {node}}}
      - {{source_labels: [__meta_ec2_instance_id], regex: i-(.+), target_label: cluster, replacement: {cluster}}}
"""


def watching_runs(configuration: str, runs_dirs: list[str]) -> str:
    """Returns the configuration of Prometheus that reads the targets of runs from these folders too."""
    also = "".join(f", {folder.rstrip('/')}/.targets/*.json" for folder in runs_dirs)
    text, found = _TRAINING.subn(rf"\g<before>\g<file>{also}\g<after>", configuration)
    if found != 1:
        raise ValueError("prometheus.yml: the files of the job training are not where they were expected")
    return text


def finding_elastic_nodes(configuration: str, elastic: dict[str, Any]) -> str:
    """Returns the configuration of Prometheus that asks EC2 for the elastic nodes of a stack.

    `elastic` has cluster, region, group (the Auto Scaling group) and ports (job name to port); empty changes nothing.
    The labels are those that the inventory gives these nodes (inventory/pulumi_stack.py), so a series goes on under the
    same name, and a node that is in a file of targets too is one target and not two.
    """
    for job, port in elastic.get("ports", {}).items():
        pattern = rf"(?P<files>^    file_sd_configs: \[\{{files: \[targets/{job}/\*\.json\][^\n]*\n)"
        pattern += r"(?P<between>(?:(?!  - job_name)[^\n]*\n)*?    relabel_configs:\n)"
        found = re.search(pattern, configuration, re.MULTILINE)
        if found is None:
            raise ValueError(f"prometheus.yml: the targets of the job {job} are not where they were expected")
        question = _DISCOVERY.format(port=port, **{key: json.dumps(elastic[key]) for key in ("region", "group")})
        labels = _ELASTIC_LABELS.format(
            node=json.dumps(f"{elastic['cluster']}-elastic-$1"), cluster=json.dumps(elastic["cluster"])
        )
        made = found["files"] + question + found["between"] + labels
        configuration = configuration[: found.start()] + made + configuration[found.end() :]
    return configuration


def merged_rules(texts: list[str]) -> str:
    """Returns rule files as one, comments kept: one file to send and to look at instead of one a concern."""
    parts = []
    for text in texts:
        head, groups, tail = text.partition("groups:\n")
        if not groups:
            raise ValueError(f"a rule file does not begin with groups: {text[:60]!r}")
        parts.append(head + tail)
    return "groups:\n" + "".join(parts)


class FilterModule:
    """What Ansible looks for in this file."""

    def filters(self) -> dict[str, Any]:
        """Names of the filters."""
        return {
            "finding_elastic_nodes": finding_elastic_nodes,
            "merged_rules": merged_rules,
            "watching_runs": watching_runs,
        }
