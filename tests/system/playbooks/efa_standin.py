"""A stand-in for the EFA installer: of the same shape, signed by a throw-away key, it notes how it was called."""

from __future__ import annotations

import os
import subprocess
import tarfile
from pathlib import Path

from tests.system.hosts.cluster import Host

EFA = {"vendor": "0x1d0f", "device": "0xefa2", "class": "0x020000"}

# Leaves behind what the real one does, as far as the role looks at it.
INSTALLER = """#!/bin/sh
echo "$@" >> /var/log/efa-standin.log
mkdir -p /opt/amazon/ofi-nccl/lib/x86_64-linux-gnu /opt/amazon/efa/bin
: > /opt/amazon/ofi-nccl/lib/x86_64-linux-gnu/libnccl-net.so
cat > /opt/amazon/efa/bin/fi_info <<'END'
#!/bin/sh
for d in 0 1 2 3; do printf 'provider: efa\\n    domain: rdmap1%ss27-rdm\\n' $d; done
END
chmod +x /opt/amazon/efa/bin/fi_info
echo "# EFA installer version: VERSION" > /opt/amazon/efa_installed_packages
echo "EFA installation complete. Please logout/login; a reboot may be needed."
"""


def plug(host: Host, root: str, device: dict[str, str], count: int) -> None:
    """PCI devices, as role loopworks finds them with `root` as loopworks_facts_root."""
    for number in range(count):
        folder = f"{root}/sys/bus/pci/devices/0000:{device['vendor'][2:4]}:0{number}.0"
        files = "; ".join(f"echo {value} > {folder}/{name}" for name, value in device.items())
        host.ssh(f"mkdir -p {folder}; {files}")


class Publisher:
    """A folder as the vendor's: archives with signatures, and the key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._home = folder / "gnupg"
        self._home.mkdir(mode=0o700, parents=True)
        self._gpg("--passphrase", "", "--quick-generate-key", "Stand-in <efa@example.com>", "ed25519", "sign")
        (folder / "aws-efa-installer.key").write_bytes(self._gpg("--armor", "--export"))
        listed = self._gpg("--with-colons", "--fingerprint").decode()
        self.fingerprint = next(line.split(":")[9] for line in listed.splitlines() if line.startswith("fpr:"))

    def publish(self, version: str) -> Path:
        """Writes the archive of a version and its signature."""
        source = self.folder / "efa_installer.sh"
        source.write_text(INSTALLER.replace("VERSION", version))
        source.chmod(0o755)
        archive = self.folder / f"aws-efa-installer-{version}.tar.gz"
        with tarfile.open(archive, "w:gz") as tar:
            tar.add(source, "aws-efa-installer/efa_installer.sh")
        signature = archive.with_name(archive.name + ".sig")
        signature.unlink(missing_ok=True)
        self._gpg("--output", str(signature), "--detach-sign", str(archive))
        return archive

    def _gpg(self, *arguments: str) -> bytes:
        environment = {**os.environ, "GNUPGHOME": str(self._home)}
        command = ["gpg", "--batch", "--quiet", "--pinentry-mode", "loopback", *arguments]
        return subprocess.run(command, env=environment, check=True, capture_output=True, timeout=60).stdout

    def close(self) -> None:
        """Ends the agent that gpg has started."""
        environment = {**os.environ, "GNUPGHOME": str(self._home)}
        subprocess.run(["gpgconf", "--kill", "all"], env=environment, check=False, timeout=20)
