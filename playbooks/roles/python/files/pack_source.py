"""Packs the files of a checkout that git knows: `pack_source.py CHECKOUT FOLDER` writes FOLDER/source-HASH.tar.gz.

Prints HASH. The same files give the same name, so nothing is packed or sent twice. A checkout without git (an unpacked
release) is packed as a whole, without what begins with a dot.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
from pathlib import Path


def tracked_files(checkout: Path) -> list[Path]:
    """Returns the files to send, relative to the checkout, sorted."""
    if (checkout / ".git").exists():
        command = ["git", "-C", str(checkout), "ls-files", "-z", "--cached"]
        listed = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout.decode()
        names = [Path(name) for name in listed.split("\0") if name]
    else:
        found = (path.relative_to(checkout) for path in checkout.rglob("*"))
        names = [path for path in found if not any(part.startswith((".", "__pycache__")) for part in path.parts)]
    return sorted(name for name in names if (checkout / name).is_file())


def content_hash(checkout: Path, files: list[Path]) -> str:
    """Returns a hash of names and contents."""
    digest = hashlib.sha256()
    for name in files:
        digest.update(f"{name.as_posix()}\0".encode() + hashlib.sha256((checkout / name).read_bytes()).digest())
    return digest.hexdigest()[:16]


def pack(checkout: Path, files: list[Path], target: Path) -> None:
    """Writes the archive, whole or not at all. Owners are left out; who may execute stays."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.part")
    with tarfile.open(part, "w:gz", compresslevel=6) as archive:
        for name in files:
            member = archive.gettarinfo(str(checkout / name), name.as_posix())
            member.uid = member.gid = 0
            member.uname = member.gname = "root"
            member.mode = 0o755 if member.mode & 0o100 else 0o644
            with (checkout / name).open("rb") as file:
                archive.addfile(member, file)
    part.replace(target)


def main() -> int:
    """Packs unless it is there."""
    checkout, folder = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).expanduser()
    files = tracked_files(checkout)
    name = content_hash(checkout, files)
    target = folder / f"source-{name}.tar.gz"
    if not target.exists():
        pack(checkout, files, target)
    print(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
