"""The verdict over all nodes: who is fit, what is wrong with the others, what was left out."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

FAIL, INFO = "fail", "info"
MOST_NAMES = 12


def bandwidth_group(names: list[str], name: str) -> dict[str, Any]:
    """Returns with whom a node sums: {rank, world, first}. Two each, three at the end of an odd number."""
    place = names.index(name)
    group = min(place // 2, max(len(names) // 2 - 1, 0))
    begin = 2 * group
    members = names[begin:] if group == max(len(names) // 2 - 1, 0) else names[begin : begin + 2]
    return {"rank": place - begin, "world": len(members), "first": members[0]}


def bandwidth_findings(answer: Any, least_gb_per_s: float) -> list[dict[str, str]]:
    """Returns what a node's all-reduce says: `answer` is the result of the command; nothing when it did not run."""
    if not answer or "rc" not in answer:
        return []
    if answer["rc"] != 0:
        lines = [line.strip() for line in str(answer.get("stderr") or "").splitlines() if line.strip()]
        said = lines[-1] if lines else "no answer in time"
        return [_finding("all-reduce", FAIL, f"{said}. Is every port between the nodes open")]
    if not answer.get("stdout"):
        return []  # only the first of a pair says the figure
    told = json.loads(answer["stdout"].splitlines()[-1])
    rate = told["bytes_per_s"] / 1e9
    message = f"{rate:.2f} GB/s by {told['backend']}"
    if rate < least_gb_per_s:
        return [_finding("all-reduce", FAIL, f"{message}, below validate_bandwidth_gb_per_s {least_gb_per_s}")]
    return [_finding("all-reduce", INFO, message)]


def is_fit(findings: list[dict[str, str]]) -> bool:
    """Returns whether none of the findings keeps a node from training."""
    return all(finding["severity"] != FAIL for finding in findings)


def lasting(findings: list[dict[str, str]]) -> list[dict[str, str]]:
    """Returns the findings that are the same in the next run, in a stable order: no measurements."""
    kept = [finding for finding in findings if finding["severity"] != INFO]
    return sorted(kept, key=lambda finding: (finding["check"], finding["message"]))


def verdict_table(findings: dict[str, Any], lost: list[str], skipped: dict[str, list[str]]) -> list[str]:
    """Returns the lines of the table: one a finding, the nodes that are fit together, then what was left out.

    `findings` by node; `lost` are nodes that did not come this far; `skipped` by node.
    """
    rows = [(name, "FAIL", "playbook", "did not come this far: see above") for name in lost]
    words = {FAIL: "FAIL", INFO: "ok"}
    for name, found in findings.items():
        rows += [(name, words.get(f["severity"], "warn"), f["check"], f["message"]) for f in found]
    rows.sort(key=lambda row: (("FAIL", "warn", "ok").index(row[1]), row[0]))
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    lines = ["  ".join([*(row[i].ljust(widths[i]) for i in range(3)), row[3]]) for row in rows]
    fit = [name for name, found in findings.items() if is_fit(found)]
    unfit = len(findings) - len(fit) + len(lost)
    lines.append(f"fit to train: {_names(fit) or 'none'}" + (f"; unfit: {unfit}" if unfit else ""))
    return lines + left_out(skipped)


def left_out(skipped: dict[str, list[str]]) -> list[str]:
    """Returns a line for each thing that was left out, with the nodes that do without it."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for name, reasons in skipped.items():
        for reason in reasons:
            by_reason[reason].append(name)
    return [f"left out: {reason} ({_names(names)})" for reason, names in sorted(by_reason.items())]


def _names(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def _finding(check: str, severity: str, message: str) -> dict[str, str]:
    return {"check": check, "severity": severity, "message": message}


class FilterModule:
    """What Ansible looks for in this file."""

    def filters(self) -> dict[str, Any]:
        """Names of the filters."""
        return {
            "bandwidth_findings": bandwidth_findings,
            "bandwidth_group": bandwidth_group,
            "is_fit": is_fit,
            "lasting": lasting,
            "left_out": left_out,
            "verdict_table": verdict_table,
        }
