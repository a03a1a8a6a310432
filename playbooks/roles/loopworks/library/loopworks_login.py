#!/usr/bin/python
"""Where the connection that Ansible uses comes from and how it was authenticated: what must not be locked out."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: loopworks_login
short_description: Tells how Ansible is connected to this host
description:
  - Returns client and server address of the SSH connection, the way it was authenticated, and settings of sshd.
    Changes nothing, also outside check mode.
options: {}
author: Loopworks
"""

EXAMPLES = r"""
- name: How we are connected
  loopworks_login:
  register: __ssh_login
"""

RETURN = r"""
client:
  description: Address from which Ansible comes; empty when it runs on the host itself.
  type: str
  returned: always
port:
  description: Port of sshd that it came to; 0 when it runs on the host itself.
  type: int
  returned: always
method:
  description: publickey, password and so on as sshd logged it; unknown; or local.
  type: str
  returned: always
sshd:
  description: Settings that sshd has now, by name in lower case; empty where there is no sshd.
  type: dict
  returned: always
"""

WANTED = ("passwordauthentication", "kbdinteractiveauthentication", "maxstartups", "maxsessions", "permitrootlogin")
ENVIRONMENT = re.compile(r"(?:^|\0)SSH_CONNECTION=([^\0]*)")
DEADLINE_S = 20
LOG_LINES = "20000"


def read(path):
    """Text of a file; empty where it cannot be read."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def parent(stat):
    """Number of the parent in the text of /proc/PID/stat; the name before it may hold anything, also brackets."""
    fields = stat.rpartition(")")[2].split()
    return int(fields[1]) if len(fields) > 1 else 0


def ssh_connection(proc="/proc", pid="self"):
    """SSH_CONNECTION of the nearest ancestor that has it: sudo takes it out of our own environment."""
    number = pid
    while number:
        match = ENVIRONMENT.search(read(f"{proc}/{number}/environ"))
        if match:
            return match.group(1).split()
        number = parent(read(f"{proc}/{number}/stat"))
    return []


def accepted(log, client, port):
    """How sshd says that it let this connection in; unknown where the log does not tell."""
    pattern = re.compile(r"Accepted (\S+) for \S+ from " + re.escape(client) + r" port " + re.escape(port) + r"\b")
    found = pattern.findall(log)
    return found[-1] if found else "unknown"


def output(command):
    """What a command prints; empty where it is missing or fails."""
    tool = shutil.which(command[0]) or shutil.which(command[0], path="/usr/sbin:/sbin")
    if tool is None:
        return ""
    try:
        done = subprocess.run([tool, *command[1:]], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout if done.returncode == 0 else ""


def sshd_log():
    """What sshd logged lately: the journal, or the file where there is no journal."""
    names = ["-t", "sshd", "-t", "sshd-session", "-t", "sshd-auth"]
    return output(["journalctl", "-q", "-o", "cat", "-n", LOG_LINES, *names]) or read("/var/log/auth.log")


def sshd_settings(text):
    """The wanted settings out of `sshd -T`."""
    pairs = (line.split(" ", 1) for line in text.splitlines() if " " in line)
    return {name: value for name, value in pairs if name in WANTED}


def main():
    """Entry of the module."""
    module = AnsibleModule({}, supports_check_mode=True)
    connection = ssh_connection()
    client, client_port, port = (connection[0], connection[1], connection[3]) if len(connection) == 4 else ("", "", "0")
    module.exit_json(
        changed=False,
        client=client,
        port=int(port),
        method=accepted(sshd_log(), client, client_port) if client else "local",
        sshd=sshd_settings(output(["sshd", "-T"])),
    )


if __name__ == "__main__":
    main()
