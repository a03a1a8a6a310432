#!/usr/bin/python
"""Looks at the node it runs on: is it fit to train. Changes nothing; what is wrong is a finding, never a failure."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: validate_node
short_description: Is this node fit to train
description:
  - Health checks, units, the Python environment, shared storage, drain mark. Returns findings; changes nothing.
options:
  prefix:
    description: Where the kit lies.
    type: path
    required: true
  user:
    description: The account that trains.
    type: str
    required: true
  units:
    description: Units that have to be active.
    type: list
    elements: str
    required: true
  shared:
    description: Folder that all nodes share.
    type: path
    required: true
  word:
    description: What the head has written there.
    type: str
    required: true
  shared_required:
    description: Whether it is a fault when it is not shared.
    type: bool
    required: true
  drained:
    description: Why the node is drained; empty when it is not.
    type: str
    default: ""
  gpu_count:
    description: GPUs that torch has to see.
    type: int
    default: 0
author: Loopworks
"""

EXAMPLES = r"""
- name: Look at the node
  validate_node:
    prefix: /opt/loopworks
    user: loopworks
    units: [ssh]
    shared: /shared
    word: a1b2
    shared_required: true
"""

RETURN = r"""
findings:
  description: What is not as it should be, each with check, severity (fail or warning) and message.
  type: list
  returned: always
"""

FAIL, WARNING = "fail", "warning"
QUICK_S, IMPORT_S, HEALTH_S = 20, 180, 40
PROVIDERS = {
    "ssh": "ssh.yml",
    "chrony": "base.yml",
    "redis-server": "redis.yml",
    "nvidia-persistenced": "nvidia.yml",
    "nvidia-dcgm": "nvidia.yml",
    "nvidia-fabricmanager": "nvidia.yml",
}
IMPORTS = """
import json, importlib.metadata as m, torch
import deepspeed
gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
print(json.dumps({"torch": m.version("torch"), "deepspeed": m.version("deepspeed"), "gpus": gpus}))
"""
# Runs as the account that trains. A name that was asked for in vain may be remembered by an NFS client for a while.
SHARED = """
import json, os, socket, sys, time
folder, word = sys.argv[1:3]
runs = os.path.join(folder, "runs")
folder = runs if os.path.isdir(runs) else folder
own = os.path.join(folder, ".validate-%s.%s" % (word, socket.gethostname()))
answer = {"written": "", "read": False}
try:
    with open(own, "w") as file:
        file.write(word)
    os.unlink(own)
except OSError as error:
    answer["written"] = "%s: %s" % (folder, error.strerror)
deadline = time.monotonic() + 8
while not answer["read"] and time.monotonic() < deadline:
    try:
        with open(os.path.join(folder, ".validate-" + word)) as file:
            answer["read"] = file.read() == word
    except OSError:
        pass
    if not answer["read"]:
        time.sleep(0.5)
print(json.dumps(answer))
"""


def finding(check, severity, message):
    """One thing that is not as it should be."""
    return {"check": check, "severity": severity, "message": message}


def run(argv, timeout_s=QUICK_S, text=None):
    """Exit code, output and errors of a program; code None when it gives no answer, 127 when it is not there."""
    try:
        done = subprocess.run(argv, input=text, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return None, "", f"no answer within {timeout_s} s"
    except OSError as error:
        return 127, "", str(error)
    return done.returncode, done.stdout, done.stderr


def last_line(text):
    """The last line that says something."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no message")


def as_user(user, *argv):
    """The command by which the account that trains runs something, with its own environment."""
    return ["runuser", "--login", user, "--command", "exec " + " ".join(_quoted(word) for word in argv)]


def _quoted(word):
    return "'" + word.replace("'", "'\\''") + "'"


def unit_findings(states):
    """From a unit's LoadState and ActiveState, by name."""
    found = []
    for name, (load, active) in states.items():
        if load == "not-found":
            playbook = PROVIDERS.get(name, "monitoring.yml")
            found.append(finding("unit", FAIL, f"{name} is not installed: run {playbook}"))
        elif active != "active":
            found.append(finding("unit", FAIL, f"{name} is {active}: journalctl -u {name} says why"))
    return found


def unit_states(names):
    """Load and active state of each unit."""
    states = {}
    for name in names:
        _, output, _ = run(["systemctl", "show", "--property=LoadState,ActiveState", name])
        values = dict(line.split("=", 1) for line in output.splitlines() if "=" in line)
        states[name] = (values.get("LoadState", "unknown"), values.get("ActiveState", "unknown"))
    return states


def python_findings(answer, pins, gpu_count):
    """From what the environment says of itself: (exit code, output, errors)."""
    code, output, errors = answer
    if code != 0:
        message = errors if code is None else last_line(errors)
        return [finding("python", FAIL, f"torch or deepspeed cannot be imported: {message}. Run python.yml")]
    told = json.loads(last_line(output))
    found = [
        finding("python", FAIL, f"{name} is {told[name]}, constraints say {pins[name]}: run python.yml")
        for name in ("torch", "deepspeed")
        if name in pins and told[name].split("+")[0] != pins[name].split("+")[0]
    ]
    if gpu_count and told["gpus"] != gpu_count:
        found.append(finding("python", FAIL, f"torch sees {told['gpus']} GPUs of {gpu_count}"))
    return found


def pinned(constraints, version):
    """Versions of torch and deepspeed in a constraints file; those with a marker count from Python 3.11 on."""
    pins = {}
    for line in constraints.splitlines():
        match = re.match(r"(torch|deepspeed)==([^\s;]+)(.*)", line)
        if match and (not match.group(3).strip() or version >= (3, 11)):
            pins[match.group(1)] = match.group(2)
    return pins


def shared_findings(answer, folder, required):
    """From what the account that trains could do in the shared folder."""
    code, output, errors = answer
    severity = FAIL if required else WARNING
    if code is None:
        return [finding("storage", FAIL, f"{folder} does not answer: is its server up")]
    if code != 0:
        return [finding("storage", FAIL, f"{folder}: {last_line(errors)}")]
    told = json.loads(last_line(output))
    found = []
    if told["written"]:
        found.append(finding("storage", severity, f"the account that trains cannot write to {told['written']}"))
    if not told["read"]:
        found.append(
            finding("storage", severity, f"{folder} is not shared: what the head writes there is not seen here")
        )
    return found


def health_findings(report):
    """From the report of health.py."""
    severities = {"failed": FAIL, "warning": WARNING}
    return [
        finding(name, severities.get(status, FAIL), report.get("messages", {}).get(name, status))
        for name, status in sorted(report["checks"].items())
        if status != "ok"
    ]


def health(prefix):
    """Runs the health checks of the node now."""
    script = Path(prefix, "monitoring/health.py")
    if not script.is_file():
        return [finding("health", FAIL, "the node has no health checks: run monitoring.yml")]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "health.json")
        code, _, errors = run([sys.executable, str(script), "--out", str(report)], HEALTH_S)
        if not report.is_file():
            return [finding("health", FAIL, errors if code is None else last_line(errors))]
        return health_findings(json.loads(report.read_text()))


def fabric_manager_findings(loaded, packages):
    """Fabric Manager has to be the driver's version to the last digit. `packages` are lines `name version`."""
    versions = [line.split()[1] for line in packages.splitlines() if len(line.split()) == 2]
    equal = re.compile(rf"(^|[:-]){re.escape(loaded)}([-+~]|$)")
    wrong = [version for version in versions if not equal.search(version)]
    return [
        finding("fabric_manager", FAIL, f"{version}, while the driver is {loaded}: run nvidia.yml") for version in wrong
    ]


def fabric_manager():
    """Version of Fabric Manager against the loaded driver."""
    loaded = Path("/sys/module/nvidia/version")
    if not loaded.is_file():
        return []
    query = ["dpkg-query", "--show", "--showformat=${db:Status-Abbrev}${Package} ${Version}\n", "nvidia-fabricmanager*"]
    _, output, _ = run(query)
    installed = [line[3:].strip() for line in output.splitlines() if line.startswith("ii")]
    return fabric_manager_findings(loaded.read_text().strip(), "\n".join(installed))


def failed_units():
    """Units that systemd calls failed, whoever they belong to."""
    _, output, _ = run(["systemctl", "list-units", "--failed", "--plain", "--no-legend"])
    names = sorted(line.split()[0] for line in output.splitlines() if line.strip())
    return [finding("unit", WARNING, f"failed: {', '.join(names)}")] if names else []


def look(wanted):
    """All findings about this node."""
    python = str(Path(wanted["prefix"], "venv/bin/python"))
    constraints = Path(wanted["prefix"], "constraints.txt")
    code, output, _ = run([python, "-c", "import sys; print(sys.version_info[0], sys.version_info[1])"])
    version = tuple(int(word) for word in output.split()) if code == 0 else (0, 0)
    pins = pinned(constraints.read_text(), version) if constraints.is_file() else {}
    found = health(wanted["prefix"])
    found += unit_findings(unit_states(wanted["units"]))
    found += failed_units()
    found += fabric_manager()
    found += python_findings(run(as_user(wanted["user"], python, "-c", IMPORTS), IMPORT_S), pins, wanted["gpu_count"])
    shared = as_user(wanted["user"], "/usr/bin/python3", "-c", SHARED, wanted["shared"], wanted["word"])
    found += shared_findings(run(shared, QUICK_S), wanted["shared"], wanted["shared_required"])
    if wanted["drained"]:
        found.append(finding("drained", WARNING, f"it is drained: {wanted['drained']}"))
    return found


def main():
    """Entry of the module."""
    required = {
        **{name: {"type": "path", "required": True} for name in ("prefix", "shared")},
        **{name: {"type": "str", "required": True} for name in ("user", "word")},
        "units": {"type": "list", "elements": "str", "required": True},
        "shared_required": {"type": "bool", "required": True},
    }
    optional = {"drained": {"type": "str", "default": ""}, "gpu_count": {"type": "int", "default": 0}}
    module = AnsibleModule({**required, **optional}, supports_check_mode=True)
    module.exit_json(changed=False, findings=look(module.params))


if __name__ == "__main__":
    main()
