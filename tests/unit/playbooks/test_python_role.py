"""What a node's Python has to hold, and the project that the head gets."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import jinja2
import pytest

from tests.unit.playbooks.plugins import load

ROOT = Path(__file__).resolve().parents[3]
ROLE = ROOT / "playbooks/roles/python"
PACK = ROLE / "files/pack_source.py"


requirements = load("roles/python/filter_plugins/requirements.py")
PROJECT = """
[project]
dependencies = ["torch>=2.9", "deepspeed>=0.19"]
[project.optional-dependencies]
nodes = ["ansible-core>=2.17"]
"""


def test_extras_follow_the_dependencies() -> None:
    assert requirements.project_requirements(PROJECT, []) == ["torch>=2.9", "deepspeed>=0.19"]
    assert requirements.project_requirements(PROJECT, ["nodes"])[-1] == "ansible-core>=2.17"


def test_an_unknown_extra_is_refused_with_those_that_are_there() -> None:
    with pytest.raises(ValueError, match="no extra gpu.*Take one of nodes"):
        requirements.project_requirements(PROJECT, ["gpu"])


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_constraints_of_the_checkout_pin_torch_and_deepspeed_in_one_text(platform: str) -> None:
    folder = ROOT / "constraints"
    text = requirements.merged_constraints(
        (folder / f"{platform}.txt").read_text(), (folder / "common.txt").read_text()
    )
    names = [line.split("==")[0] for line in text.splitlines() if "==" in line]
    assert {"torch", "deepspeed"} <= set(names)
    assert "-c " not in text


def test_any_part_changes_the_stamp() -> None:
    parts = {"requirements": ["a"], "constraints": "a==1", "version": "3.11"}
    stamps = {requirements.content_stamp(parts)}
    stamps |= {
        requirements.content_stamp({**parts, key: value})
        for key, value in {"requirements": ["b"], "constraints": "a==2", "version": "3.12"}.items()
    }
    assert len(stamps) == 4


def test_only_what_git_knows_is_packed_and_the_same_files_have_the_same_name(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    (checkout / "launch").mkdir(parents=True)
    (checkout / "launch/run.py").write_text("x = 1\n")
    (checkout / "secret.key").write_text("no")
    subprocess.run(["git", "init", "-q"], cwd=checkout, check=True)
    subprocess.run(["git", "add", "launch"], cwd=checkout, check=True)

    def pack() -> str:
        command = [sys.executable, PACK, checkout, tmp_path / "out"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()

    name = pack()
    with tarfile.open(tmp_path / f"out/source-{name}.tar.gz") as archive:
        assert archive.getnames() == ["launch/run.py"]
    assert pack() == name
    (checkout / "launch/run.py").write_text("x = 2\n")
    assert pack() != name


def test_a_release_without_git_is_packed_without_caches(tmp_path: Path) -> None:
    checkout = tmp_path / "release"
    for name in ("fabfile.py", "launch/a.py", "launch/__pycache__/a.pyc", ".venv/x"):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text("")
    assert [str(path) for path in load("roles/python/files/pack_source.py").tracked_files(checkout)] == [
        "fabfile.py",
        "launch/a.py",
    ]


def pip_configuration(**values: object) -> str:
    given: dict[str, object] = {
        "python_offline": False,
        "python_index_url": "",
        "__python_index_urls": [],
        "__python_wheels": [],
        **values,
    }
    environment = jinja2.Environment(trim_blocks=True, undefined=jinja2.StrictUndefined)
    return environment.from_string((ROLE / "templates/pip.conf.j2").read_text()).render(given)


def test_offline_asks_no_index_and_looks_into_the_wheelhouse() -> None:
    text = pip_configuration(
        python_offline=True, __python_index_urls=["https://index.example"], __python_wheels=["/shared/wheels"]
    )
    assert "no-index = true" in text and "/shared/wheels" in text
    assert "index.example" not in text


def test_indexes_stand_in_the_file() -> None:
    text = pip_configuration(
        python_index_url="https://a:b@index.example/simple", __python_index_urls=["https://torch.example"]
    )
    assert "index-url = https://a:b@index.example/simple" in text
    assert "extra-index-url =\n    https://torch.example" in text
    assert "find-links" not in text
