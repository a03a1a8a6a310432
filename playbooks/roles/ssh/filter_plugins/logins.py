"""Keys of people, and whether passwords may be refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

KEY_PREFIXES = ("ssh-", "ecdsa-", "sk-")


def public_keys(items: list[str]) -> list[str]:
    """Keys, each once; an item that is no key is a file on the controller. Raises ValueError where it has no keys."""
    keys = []
    for item in items:
        text = item if item.startswith(KEY_PREFIXES) else Path(item).expanduser().read_text(encoding="utf-8")
        lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
        if not lines or not all(line.startswith(KEY_PREFIXES) for line in lines):
            raise ValueError(f"{item} is not a public key. Name the file that ends in .pub")
        keys += lines
    return list(dict.fromkeys(keys))


def passwords_refused(login: Any, wish: str) -> bool:
    """True when sshd may refuse passwords. `login` is what the module loopworks_login returns, `wish` ssh_passwords.

    With `auto` only where it is certain that nobody depends on them: this connection came in by a key, or the daemon
    refuses passwords already.
    """
    if wish != "auto":
        return wish == "refuse"
    sshd = login.get("sshd") or {}
    already = all(sshd.get(f"{kind}authentication") == "no" for kind in ("password", "kbdinteractive"))
    return already or login.get("method") == "publickey"


class FilterModule:
    """What Ansible looks for in this file."""

    def filters(self) -> dict[str, Any]:
        """Names of the filters."""
        return {"public_keys": public_keys, "passwords_refused": passwords_refused}
