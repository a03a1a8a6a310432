"""Who serves, who mounts what, and that a disk with something on it is never touched."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import pytest
from ansible.errors import AnsibleFilterError
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.playbooks.plugins import PLAYBOOKS, load

storage = load("roles/storage/filter_plugins/storage.py")

GROUPS = {"head": ["head1"], "gpu_nodes": ["gpu1", "gpu2"], "storage": []}
HOSTVARS: dict[str, Any] = {
    "head1": {"loopworks_private_ip": "10.0.0.1"},
    "store1": {"ansible_host": "10.0.0.9"},
    "gpu1": {"ansible_facts": {"default_ipv4": {"address": "10.0.0.2"}}},
    "gpu2": {},
}
REAL = {"container": False, "nfs_module": True, "lustre_module": False}
SETTINGS = {"export": "/srv/shared", "head": "head1", "options": {"nfs": "N", "efs": "E", "lustre": "L"}}


def plan(
    host: str, kind: str, facts: dict[str, Any] | None = None, groups: Any = None, **fields: str
) -> dict[str, Any]:
    wanted = {"kind": kind, "mount_point": "/shared", **fields}
    return dict(storage.storage_plan(wanted, host, groups or GROUPS, HOSTVARS, facts or REAL, SETTINGS))


def test_the_head_serves_where_no_source_is_named() -> None:
    head, node = plan("head1", "nfs"), plan("gpu1", "nfs")
    assert (head["serves"], head["what"], head["type"], head["options"]) == (True, "/srv/shared", "none", "bind")
    assert (head["packages"], head["folders_in"]) == (["nfs-kernel-server"], "/srv/shared")
    assert (node["serves"], node["what"], node["type"], node["options"]) == (False, "10.0.0.1:/srv/shared", "nfs4", "N")
    assert (node["packages"], node["folders_in"], node["unit"]) == (["nfs-common"], "", "shared.mount")


def test_a_storage_group_serves_instead() -> None:
    groups = {**GROUPS, "storage": ["store1"]}
    assert plan("store1", "nfs", groups=groups)["serves"]
    assert not plan("head1", "nfs", groups=groups)["serves"]
    assert plan("gpu1", "nfs", groups=groups)["what"] == "10.0.0.9:/srv/shared"


def test_the_source_of_an_aws_stack_is_the_head() -> None:
    head = plan("head1", "nfs", source="10.0.0.1:/srv/shared", options="stack")
    assert head["serves"] and head["export"] == "/srv/shared"
    assert plan("gpu2", "nfs", source="10.0.0.1:/srv/shared", options="stack")["options"] == "stack"


def test_a_foreign_server_is_only_mounted_and_the_head_makes_the_folders() -> None:
    assert not plan("head1", "nfs", source="nas.example:/vol")["serves"]
    assert plan("head1", "nfs", source="nas.example:/vol")["folders_in"] == "/shared"
    assert plan("gpu1", "nfs", source="nas.example:/vol")["folders_in"] == ""


@pytest.mark.parametrize(("kind", "type_", "options"), [("efs", "nfs4", "E"), ("fsx-lustre", "lustre", "L")])
def test_managed_kinds_have_their_own_options(kind: str, type_: str, options: str) -> None:
    made = plan("gpu1", kind, source="fs-1.example:/x")
    assert (made["type"], made["options"], made["mounts"]) == (type_, options, True)


def test_a_container_mounts_nothing_and_says_so() -> None:
    made = plan("gpu1", "nfs", {**REAL, "container": True})
    assert (made["mounts"], made["packages"], made["folders_in"]) == (False, [], "")
    assert "container" in made["skip"]
    assert "NFS module" in plan("gpu1", "nfs", {**REAL, "nfs_module": False})["skip"]


def test_kind_none_takes_what_is_there() -> None:
    made = plan("gpu1", "none", {**REAL, "container": True})
    assert (made["mounts"], made["skip"], made["folders_in"]) == (False, "", "/shared")
    assert plan("gpu1", "none", mount_point="")["skip"]


@given(st.lists(st.from_regex(r"[A-Za-z0-9_.@-]{1,8}", fullmatch=True), min_size=1, max_size=4))
def test_units_are_named_as_systemd_names_them(parts: list[str]) -> None:
    path = "/" + "/".join(parts)
    if shutil.which("systemd-escape") is None or {".", ".."} & set(parts):
        return
    command = ["systemd-escape", "--path", "--suffix=mount", path]
    assert (
        storage.mount_unit(path) == subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    )


@pytest.mark.parametrize("path", ["shared", "/", "/a b", "/a//b", "/a/$(x)", ""])
def test_other_paths_are_refused(path: str) -> None:
    with pytest.raises(AnsibleFilterError, match="cannot be a mount point"):
        storage.mount_unit(path)


def disk(path: str, **fields: Any) -> dict[str, Any]:
    return {"path": path, "type": "disk", "fstype": None, "pttype": None, "label": None, "mountpoint": None, **fields}


def test_the_volume_of_a_stack_is_found_by_its_serial_number() -> None:
    listed = {"blockdevices": [disk("/dev/nvme0n1", pttype="gpt"), disk("/dev/nvme1n1", serial="vol0ab")]}
    assert storage.data_disk(listed, "/dev/sdf", "vol-0ab") == {"device": "/dev/nvme1n1", "action": "format", "why": ""}
    assert storage.data_disk(listed, "/dev/sdf", "vol-other")["action"] == "refuse"
    listed["blockdevices"][1] |= {"fstype": "ext4", "label": "lw-export"}
    assert storage.data_disk(listed, "/dev/sdf", "vol-0ab")["action"] == "use"
    listed["blockdevices"][1]["label"] = "mine"
    assert storage.data_disk(listed, "/dev/sdf", "vol-0ab")["why"] == "/dev/nvme1n1 carries ext4"


@given(st.lists(st.sampled_from(["", "fstype", "pttype", "mountpoint", "children"]), min_size=1, max_size=5))
def test_scratch_never_touches_a_disk_with_anything_on_it(carried: list[str]) -> None:
    disks = [disk(f"/dev/nvme{n}n1", **({key: "x"} if key else {})) for n, key in enumerate(carried)]
    for one in disks:
        if one.get("children"):
            one["children"] = [disk("/dev/md0")]
    made = storage.scratch_plan({"blockdevices": disks}, [one["path"] for one in disks])
    if any(carried):
        assert (made["action"], made["devices"]) == ("skip", []) and "never formatted" in made["why"]
    else:
        assert made["action"] == ("raid" if len(disks) > 1 else "format")


def test_scratch_that_is_there_is_used() -> None:
    array = disk("/dev/md127", type="raid0", fstype="ext4", label="lw-scratch")
    disks = [disk(f"/dev/nvme{n}n1", fstype="linux_raid_member", children=[array]) for n in range(2)]
    assert storage.scratch_plan({"blockdevices": disks}, ["/dev/nvme0n1", "/dev/nvme1n1"])["action"] == "use"
    assert storage.scratch_plan({"blockdevices": disks}, [])["why"] == "no local disks for scratch"


def test_the_client_is_that_of_the_running_kernel_or_it_is_said_which_kernels_have_one() -> None:
    served = [f"5.15.0-{build}-aws" for build in (1084, 999, 1101, 1090)]
    offered = ["lustre-client-modules-aws", *(f"lustre-client-modules-{kernel}" for kernel in served)]
    found = storage.lustre_client(offered, "5.15.0-1090-aws")
    assert found == {
        "package": "lustre-client-modules-5.15.0-1090-aws",
        "kernels": ["5.15.0-1101-aws", "5.15.0-1090-aws", "5.15.0-1084-aws"],
    }
    assert storage.lustre_client(offered, "5.15.0-108-aws")["package"] == "", "the whole name counts"
    assert storage.lustre_client([], "6.1.0-18-amd64") == {"package": "", "kernels": []}


def test_each_part_of_the_client_that_is_installed_is_held_once() -> None:
    lines = [
        "ii  lustre-client-utils",
        "hi  lustre-client-modules-6.8.0-1-aws",
        "rc  lustre-client-modules-6.8.0-0-aws",
    ]
    assert storage.lustre_unheld(lines) == ["lustre-client-utils"]


def test_the_automount_does_not_wait_for_the_network() -> None:
    """systemd puts it before local-fs.target; the packet filter comes after that, and the network after the filter."""
    unit = (PLAYBOOKS / "roles/storage/templates/shared.automount.j2").read_text()
    assert "network-online.target" not in unit
    assert "After=network-online.target" in (PLAYBOOKS / "roles/storage/templates/shared.mount.j2").read_text()
