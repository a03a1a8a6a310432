"""A signed apt repository of dummy packages with NVIDIA's names and versions, and what a node with GPUs looks like.

The packages behave as the real ones where it matters: a driver module that is in the kernel stays there until the next
boot, NVML and Fabric Manager refuse another version, metapackages ask for "at least", DCGM 3 and 4 own the same unit.
"""

from __future__ import annotations

from pathlib import Path

from tests.system.playbooks.dummy_packages import Package, publish

DRIVERS = ("580.126.09", "580.173.02", "580.173.05", "595.71.05", "620.19.01")
# Its Fabric Manager does not start: what an upgrade has to notice.
BROKEN = "580.173.05"
# A repository that has moved on for one part only: this driver has no Fabric Manager.
WITHOUT_FABRIC_MANAGER = "595.71.05"
DCGM = ("1:4.5.2-1", "1:4.6.0-1")
KERNELS = ("6.1.140-1", "6.1.155-1")
LABEL = "NVIDIA CUDA"
SYSFS = "/opt/loopworks-test"

# Device number, how many, NVSwitches: as their boards show themselves on PCI.
GPUS = {
    "a100-sxm": ("0x20b2", 8, 6),
    "h100-sxm": ("0x2330", 8, 4),
    "h200": ("0x2335", 8, 4),
    "l40s": ("0x26b9", 4, 0),
    "v100-sxm2": ("0x1db5", 8, 0),
    "none": ("", 0, 0),
}

# The module of a version comes into the kernel only when none is there; nouveau keeps it out.
LOAD = f"""#!/bin/sh
module={SYSFS}/sys/module/nvidia
[ ! -d {SYSFS}/sys/module/nouveau ] || {{ echo "nouveau holds the GPUs" >&2; exit 1; }}
[ -s $module/version ] || {{ mkdir -p $module; cat /usr/lib/loopworks-test/module >$module/version; }}
"""
BOOT = f"""#!/bin/sh
grep -qs "^blacklist nouveau" /etc/modprobe.d/* && rm -rf {SYSFS}/sys/module/nouveau
rm -rf {SYSFS}/sys/module/nvidia
[ -d {SYSFS}/sys/module/nouveau ] || /usr/lib/loopworks-test/load
"""
SAME = f"""#!/bin/sh
[ "$(cat {SYSFS}/sys/module/nvidia/version)" = "$1" ] || {{ echo "the module is not of version $1" >&2; exit 1; }}
"""
SMI = f"""#!/bin/sh
loaded=$(cat {SYSFS}/sys/module/nvidia/version 2>/dev/null) || exit 9
[ "$loaded" = VERSION ] || {{ echo "Failed to initialize NVML: Driver/library version mismatch"; exit 18; }}
for class in $(cat {SYSFS}/sys/bus/pci/devices/*/class); do [ $class != 0x030200 ] || echo VERSION; done
"""
RUN_UNIT = """[Unit]
Description={name}
{after}
[Service]
{checks}
ExecStart={command}
[Install]
WantedBy=multi-user.target
"""
BOOT_UNIT = """[Unit]
Description=nvidia module
Before=nvidia-persistenced.service nvidia-fabricmanager.service nvidia-dcgm.service
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/lib/loopworks-test/boot
[Install]
WantedBy=multi-user.target
"""
DAEMON = "#!/bin/sh\nexec sleep infinity\n"
UNITS = "lib/systemd/system"


def unit(name: str, command: str, *checks: str, after: str = "") -> str:
    """A service that runs `command` once `checks` have passed."""
    lines = "\n".join(f"ExecStartPre={check}" for check in checks)
    return RUN_UNIT.format(name=name, command=command, checks=lines, after=f"After={after}" if after else "")


def started(name: str) -> str:
    """What a maintainer script does with a unit; a service that does not start is no error of the package."""
    return f"systemctl daemon-reload; systemctl enable -q {name}; systemctl restart {name} || true\n"


def driver(version: str) -> list[Package]:
    """The packages of one driver version, as in NVIDIA's repository for Debian."""
    full, least = f"{version}-1", f"(>= {version}-1)"
    branch = version.split(".", maxsplit=1)[0]
    same = f"/usr/lib/loopworks-test/same {version}"
    modules = {
        "usr/lib/loopworks-test/module": version,
        "usr/lib/loopworks-test/load": LOAD,
        "usr/lib/loopworks-test/boot": BOOT,
        "usr/lib/loopworks-test/same": SAME,
        f"{UNITS}/loopworks-test-module.service": BOOT_UNIT,
    }
    enable = "systemctl daemon-reload; systemctl enable -q loopworks-test-module\n"
    persistenced = "/usr/bin/nvidia-persistenced --user nvpd --no-persistence-mode --verbose"
    pin = f"Package: nvidia-* libnvidia-* libcuda1 cuda-drivers*\nPin: version {version}-*\nPin-Priority: 1000\n"
    made = [
        Package("nvidia-open", full, {"Depends": f"nvidia-driver-cuda {least}, nvidia-kernel-open-dkms {least}"}),
        Package("cuda-drivers", full, {"Depends": f"nvidia-driver-cuda {least}, nvidia-kernel-dkms {least}"}),
        Package(
            "nvidia-driver-cuda",
            full,
            {"Depends": f"libcuda1 {least}, libnvidia-ml1 {least}, nvidia-persistenced {least}"},
            {"usr/bin/nvidia-smi": SMI.replace("VERSION", version)},
        ),
        Package("libcuda1", full, {"Depends": f"libnvidia-ml1 {least}"}),
        Package("libnvidia-ml1", full),
        Package("nvidia-kernel-open-dkms", full, {"Conflicts": "nvidia-kernel-dkms"}, modules, enable),
        Package("nvidia-kernel-dkms", full, {"Conflicts": "nvidia-kernel-open-dkms"}, modules, enable),
        Package(
            "nvidia-persistenced",
            full,
            {},
            {
                "usr/bin/nvidia-persistenced": DAEMON,
                f"{UNITS}/nvidia-persistenced.service": unit(
                    "persistence",
                    persistenced,
                    "/usr/lib/loopworks-test/load",
                    same,
                    after="loopworks-test-module.service",
                ),
            },
            "systemctl daemon-reload; systemctl enable -q nvidia-persistenced\n",
        ),
        Package(
            f"nvidia-driver-pinning-{version}",
            full,
            {"Provides": "nvidia-driver-pinning", "Conflicts": "nvidia-driver-pinning"},
            {f"etc/apt/preferences.d/nvidia-driver-pinning-{version}": pin},
        ),
    ]
    if version != WITHOUT_FABRIC_MANAGER:
        checks = ["/bin/false"] if version == BROKEN else [same]
        manager = unit("fabric manager", "/usr/bin/nv-fabricmanager", *checks, after="nvidia-persistenced.service")
        files = {"usr/bin/nv-fabricmanager": DAEMON, f"{UNITS}/nvidia-fabricmanager.service": manager}
        made.append(
            Package("nvidia-fabricmanager", full, {"Provides": f"nvidia-fabricmanager-{branch} (= {full})"}, files)
        )
    return made


def others() -> list[Package]:
    """DCGM, the key package, kernels."""
    dcgm_unit = {
        f"{UNITS}/nvidia-dcgm.service": unit("dcgm", "/usr/bin/nv-hostengine"),
        "usr/bin/nv-hostengine": DAEMON,
    }
    made = [Package("datacenter-gpu-manager", "1:3.3.9", {}, dcgm_unit, started("nvidia-dcgm"))]
    for version in DCGM:
        tool = {"usr/bin/dcgmi": f"#!/bin/sh\necho version: {version[2:-2]}\n"}
        made.append(Package("datacenter-gpu-manager-4-core", version, {}, {**dcgm_unit, **tool}))
        made += [
            Package(
                f"datacenter-gpu-manager-4-{part}", version, {"Depends": f"datacenter-gpu-manager-4-core (= {version})"}
            )
            for part in ("cuda12", "cuda13", "proprietary")
        ]
    entry = "deb [signed-by=/usr/share/keyrings/cuda-archive-keyring.gpg] file:REPOSITORY /\n"
    made.append(Package("cuda-keyring", "1.1-1", {}, {"etc/apt/sources.list.d/cuda-debian12-x86_64.list": entry}))
    made += [Package(f"linux-{kind}-amd64", version) for kind in ("image", "headers") for version in KERNELS]
    return made


def build(folder: Path) -> str:
    """Builds and signs the repository in `folder`, with its key beside it (key.asc). Returns the key's fingerprint."""
    packages = [package for version in DRIVERS for package in driver(version)] + others()
    return publish(folder, packages, folder / "key.asc", Origin="NVIDIA", Label=LABEL)


def sysfs(root: Path, kind: str) -> None:
    """Makes the files by which a host below `root` shows GPUs of one kind."""
    device, gpus, switches = GPUS[kind]
    base = root / SYSFS.lstrip("/")
    found = [(device, "0x030200")] * gpus + [("0x1af1", "0x068000")] * switches
    for number, (name, pci_class) in enumerate(found):
        place = base / f"sys/bus/pci/devices/0000:{number:02x}:00.0"
        place.mkdir(parents=True)
        for key, value in (("vendor", "0x10de"), ("device", name), ("class", pci_class)):
            (place / key).write_text(value + "\n")
    (base / "sys/module").mkdir(parents=True, exist_ok=True)
