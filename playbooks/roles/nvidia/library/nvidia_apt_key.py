#!/usr/bin/python
"""Lays an OpenPGP key file down for apt when it holds the expected keys and no others. Needs no gpg on the node."""

from __future__ import annotations

import base64
import binascii
import hashlib
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.urls import open_url

DOCUMENTATION = r"""
module: nvidia_apt_key
short_description: A key file for apt, by fingerprint
description:
  - Writes the key file to C(path) unless what lies there already holds exactly the expected keys.
  - Refuses a file with any other primary key in it. apt would trust that one too.
options:
  path:
    description: Where the file goes, armored.
    type: path
    required: true
  url:
    description: Where it is fetched from by the node.
    type: str
  content:
    description: The armored text itself, instead of a URL.
    type: str
  fingerprints:
    description: Fingerprints of the primary keys in it, 40 hexadecimal digits each.
    type: list
    elements: str
    required: true
author: Loopworks
"""

EXAMPLES = r"""
- name: The key of the repository
  nvidia_apt_key:
    path: /etc/apt/keyrings/example.asc
    url: https://packages.example.org/key.asc
    fingerprints: [0123456789ABCDEF0123456789ABCDEF01234567]
"""

RETURN = r"""
found:
  description: Fingerprints of the primary keys in the file.
  type: list
  elements: str
  returned: when the file was read
"""

PUBLIC_KEY = 6
DEADLINE_S = 30


def dearmored(text):
    """Bytes of the armored blocks. Raises ValueError when there is none."""
    blocks, body = [], None
    for line in text.splitlines():
        if line.startswith("-----BEGIN PGP PUBLIC KEY BLOCK"):
            body = None
        elif line.startswith("-----END"):
            if body is None:
                break
            blocks.append(base64.b64decode("".join(body)))
        elif body is None:
            body = [] if not line.strip() else None  # headers end with an empty line
        elif not line.startswith("="):  # that would be the checksum
            body.append(line.strip())
    if not blocks:
        raise ValueError("it has no armored public key")
    return b"".join(blocks)


def packets(data):
    """Pairs of tag and body (RFC 9580 section 4.2). Raises ValueError where lengths do not fit."""
    place = 0
    while place < len(data):
        first = data[place]
        place += 1
        if first & 0x40:  # the newer form
            tag, length = first & 0x3F, data[place]
            place += 1
            if 192 <= length < 224:
                length = ((length - 192) << 8) + data[place] + 192
                place += 1
            elif length == 255:
                length = int.from_bytes(data[place : place + 4], "big")
                place += 4
            elif length >= 224:
                raise ValueError("a packet comes in parts")
        else:
            tag, width = (first >> 2) & 0x0F, 1 << (first & 3)
            if width == 8:
                raise ValueError("a packet has no length")
            length = int.from_bytes(data[place : place + width], "big")
            place += width
        if place + length > len(data):
            raise ValueError("it ends too early")
        yield tag, data[place : place + length]
        place += length


def fingerprints(text):
    """Fingerprints of the primary keys in an armored text. Raises ValueError when it cannot be read."""
    found = []
    try:
        for tag, body in packets(dearmored(text)):
            if tag == PUBLIC_KEY:
                if body[0] != 4:
                    raise ValueError(f"a key of version {body[0]}; only version 4 is known here")
                digest = hashlib.sha1(b"\x99" + len(body).to_bytes(2, "big") + body)  # RFC 9580 section 5.5.4.2
                found.append(digest.hexdigest().upper())
    except (IndexError, binascii.Error) as fault:
        raise ValueError(f"it is broken: {fault}") from fault
    return sorted(found)


def text_of(path):
    """What lies there now; empty where there is nothing."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def is_right(text, wanted):
    """True when the text holds exactly the wanted keys."""
    try:
        return fingerprints(text) == wanted
    except ValueError:
        return False


def main():
    """Entry of the module."""
    spec = {
        "path": {"type": "path", "required": True},
        "url": {"type": "str"},
        "content": {"type": "str"},
        "fingerprints": {"type": "list", "elements": "str", "required": True, "no_log": False},
    }
    module = AnsibleModule(spec, required_one_of=[("url", "content")], supports_check_mode=True)
    path, url, text = module.params["path"], module.params["url"], module.params["content"]
    wanted = sorted(item.replace(" ", "").upper() for item in module.params["fingerprints"])
    if is_right(text_of(path), wanted):
        module.exit_json(changed=False, found=wanted)
    if module.check_mode and text is None:
        module.exit_json(changed=True)  # what the URL gives is not looked at ahead of time
    source = "the key given" if text is not None else url
    try:
        text = text if text is not None else open_url(url, timeout=DEADLINE_S).read().decode(errors="replace")
        found = fingerprints(text)
    except (OSError, ValueError) as fault:
        module.fail_json(msg=f"no key from {source}: {fault}. Correct nvidia_repo_key, or the way there")
    if found != wanted:
        module.fail_json(
            msg=f"{source} holds the keys {', '.join(found)}, and {', '.join(wanted)} are expected; "
            "it was not laid down. "
            "Take the right file, or set nvidia_repo_key_fingerprints after having compared them by another way"
        )
    if not module.check_mode:
        Path(path).parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        fresh = Path(module.tmpdir, "key.asc")
        fresh.write_text(text)
        fresh.chmod(0o644)
        module.atomic_move(str(fresh), path)
        Path(path).chmod(0o644)
    module.exit_json(changed=True, found=found)


if __name__ == "__main__":
    main()
