#!/usr/bin/python
"""Logs in from here to every node as the account that trains, all at once, and asks each session for its limits."""

from __future__ import annotations

import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: validate_reach
short_description: Can the head log in to every node without being asked anything
description:
  - Connects over the key of the cluster with known host keys. Returns findings by node; changes nothing.
options:
  user:
    description: The account that trains.
    type: str
    required: true
  hosts:
    description: Names of the nodes, as in the inventory.
    type: list
    elements: str
    required: true
  containers:
    description: Those among them that cannot raise their own limits.
    type: list
    elements: str
    default: []
  memlock:
    description: Locked memory in KiB that a login must be allowed, or unlimited.
    type: str
    required: true
  nofile:
    description: Open files that a login must be allowed.
    type: int
    required: true
  clock_s:
    description: Seconds by which a clock may differ.
    type: float
    required: true
author: Loopworks
"""

EXAMPLES = r"""
- name: Log in to every node
  validate_reach:
    user: loopworks
    hosts: [gpu01, gpu02]
    memlock: unlimited
    nofile: 65536
    clock_s: 1.0
"""

RETURN = r"""
findings:
  description: By node, what is not as it should be.
  type: dict
  returned: always
"""

FAIL, WARNING = "fail", "warning"
AT_ONCE = 32
LOGIN_S = 25
ASK = "ulimit -l; ulimit -n; date +%s.%N"


def finding(check, severity, message):
    """One thing that is not as it should be."""
    return {"check": check, "severity": severity, "message": message}


def login_command(user, host):
    """The command that logs in without a question: neither for a password nor whether a host key is right."""
    options = [f"-o{option}" for option in ("BatchMode=yes", "StrictHostKeyChecking=yes", "ConnectTimeout=10")]
    return ["runuser", "--user", user, "--", "ssh", *options, host, ASK]


def allows(limit, wanted):
    """Whether a limit (number or unlimited) is as much as is wanted."""
    if limit == "unlimited":
        return True
    return wanted != "unlimited" and int(limit) >= int(wanted)


def session_findings(words, began, ended, wanted, is_container):
    """From what a session said: limits and its clock, asked between `began` and `ended` of the head's clock."""
    memlock, nofile, clock = words
    severity = WARNING if is_container else FAIL
    remedy = "a container cannot raise that" if is_container else "run base.yml"
    found = []
    if not allows(memlock, wanted["memlock"]):
        message = f"a login may lock {memlock} KiB of memory, {wanted['memlock']} is needed: {remedy}"
        found.append(finding("memlock", severity, message))
    if not allows(nofile, str(wanted["nofile"])):
        message = f"a login may open {nofile} files, {wanted['nofile']} are needed: {remedy}"
        found.append(finding("nofile", severity, message))
    # Between asking and answer: what lies outside is certainly off.
    off = min(0.0, float(clock) - began) + max(0.0, float(clock) - ended)
    if abs(off) > wanted["clock_s"]:
        found.append(finding("clock", FAIL, f"its clock is {off:+.1f} s off the head's: is chrony running on both"))
    return found


def ask(host, wanted):
    """Findings about one node."""
    began = time.time()
    try:
        done = subprocess.run(
            login_command(wanted["user"], host),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LOGIN_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [finding("ssh", FAIL, f"the head cannot log in: no answer within {LOGIN_S} s")]
    words = done.stdout.split()[-3:]
    if done.returncode != 0 or len(words) != 3:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        return [finding("ssh", FAIL, f"the head cannot log in: {lines[-1]}. Run ssh.yml")]
    return session_findings(words, began, time.time(), wanted, host in wanted["containers"])


def main():
    """Entry of the module."""
    arguments = {
        "user": {"type": "str", "required": True},
        "hosts": {"type": "list", "elements": "str", "required": True},
        "containers": {"type": "list", "elements": "str", "default": []},
        "memlock": {"type": "str", "required": True},
        "nofile": {"type": "int", "required": True},
        "clock_s": {"type": "float", "required": True},
    }
    module = AnsibleModule(arguments, supports_check_mode=True)
    hosts = module.params["hosts"]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = dict(zip(hosts, pool.map(lambda host: ask(host, module.params), hosts), strict=True))
    module.exit_json(changed=False, findings=found)


if __name__ == "__main__":
    main()
