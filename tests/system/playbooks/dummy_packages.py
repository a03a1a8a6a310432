"""Signed apt repositories of dummy packages: real names, versions and dependencies, and files that stand in."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path


@dataclass(frozen=True)
class Package:
    """A dummy package. `files` are paths without the leading slash; those with #! are executable."""

    name: str
    version: str
    fields: dict[str, str] = field(default_factory=dict)
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    postinst: str = ""

    @property
    def file_name(self) -> str:
        return f"{self.name}_{self.version.replace(':', '%3a')}_all.deb"

    def control(self) -> str:
        """Its control file."""
        values = {"Package": self.name, "Version": self.version, "Architecture": "all", "Section": "test"}
        values |= {"Priority": "optional", "Maintainer": "test <test@example.org>", **self.fields}
        return "".join(f"{key}: {value}\n" for key, value in {**values, "Description": "stand-in"}.items())


def publish(folder: Path, packages: list[Package], key: Path, *, suite: str = "", **release: str) -> str:
    """Builds and signs a repository in `folder`, and writes its public key to `key`. Returns the key's fingerprint.

    Without a suite the repository is flat (apt: Suites: /); with one there is dists/SUITE with the component main.
    `release` are further fields of its Release file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Built once, although several suites have it: another build is another file.
    fresh = [package for package in packages if not (folder / package.file_name).exists()]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda package: _pack(folder, package), fresh))
    index = "\n".join(_entry(folder, package) for package in packages)
    machine = run("dpkg", "--print-architecture").strip()
    top, place = (folder / "dists" / suite, f"main/binary-{machine}/Packages") if suite else (folder, "Packages")
    (top / place).parent.mkdir(parents=True, exist_ok=True)
    (top / place).write_text(index)
    digest = hashlib.sha256(index.encode()).hexdigest()
    values = {"Suite": suite or "stable", "Architectures": f"all {machine}", "Date": formatdate(usegmt=True)}
    values |= {"Components": "main"} if suite else {}
    lines = [f"{name}: {value}" for name, value in {**values, **release}.items()]
    (top / "Release").write_text("\n".join([*lines, f"SHA256:\n {digest} {len(index.encode())} {place}\n"]))
    return sign(top, key)


def sign(folder: Path, key: Path) -> str:
    """Signs Release with a new key, whose public part goes to `key`. Returns its fingerprint."""
    home = key.parent.parent / "gnupg"
    home.mkdir(mode=0o700, exist_ok=True)
    gpg = ["gpg", "--homedir", str(home), "--batch", "--yes", "--no-tty", "--quiet"]
    try:
        make = [*gpg, "--passphrase", "", "--quick-generate-key", f"{key.stem} <test@example.org>", "ed25519", "sign"]
        run(*make)
        listed = run(*gpg, "--list-keys", "--with-colons", key.stem).splitlines()
        fingerprint = next(line.split(":")[9] for line in listed if line.startswith("fpr"))
        key.write_text(run(*gpg, "--armor", "--export", fingerprint))
        run(*gpg, "-u", fingerprint, "--clearsign", "-o", str(folder / "InRelease"), str(folder / "Release"))
    finally:
        run("gpgconf", "--homedir", str(home), "--kill", "all")
    return fingerprint


def run(*command: str) -> str:
    """Returns the standard output of a command. Raises RuntimeError with what it says when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _pack(folder: Path, package: Package) -> None:
    tree = folder.parent / "build" / package.file_name
    for path, text in {**package.files, "DEBIAN/control": package.control()}.items():
        place = tree / path
        place.parent.mkdir(parents=True, exist_ok=True)
        content = text.encode() if isinstance(text, str) else text
        place.write_bytes(content)
        place.chmod(0o755 if content.startswith(b"#!") else 0o644)
    if package.postinst:
        script = tree / "DEBIAN/postinst"
        script.write_text(f"#!/bin/sh\n{package.postinst}exit 0\n")
        script.chmod(0o755)
    run("dpkg-deb", "-Znone", "--root-owner-group", "--build", str(tree), str(folder / package.file_name))


def _entry(folder: Path, package: Package) -> str:
    data = (folder / package.file_name).read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    return f"{package.control()}Filename: ./{package.file_name}\nSize: {len(data)}\nSHA256: {digest}\n"
