"""Every damage is refused and named, and the previous checkpoint is taken."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from training.checkpoint import catalog, layout
from training.checkpoint.verify import describe, verify


def _everything(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


@pytest.fixture
def root(tmp_path, make_checkpoint):
    make_checkpoint(tmp_path, 10)
    make_checkpoint(tmp_path, 20)
    return tmp_path


def _assert_previous_is_taken(root: Path, named: str) -> None:
    choice = catalog.newest_valid(root)
    assert choice.manifest.step == 10
    (passed,) = choice.passed_over
    assert passed.step == 20
    assert named in passed.reason


def test_a_sound_checkpoint_has_no_faults(root):
    assert verify(root / "step-00000020") == []
    assert catalog.newest_valid(root).manifest.step == 20


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_one_flipped_bit_anywhere_is_found(root, data):
    folder = root / "step-00000020"
    name = data.draw(st.sampled_from(_everything(folder)))
    path = folder / name
    original = path.read_bytes()
    position = data.draw(st.integers(0, len(original) - 1))
    mask = 1 << data.draw(st.integers(0, 7))
    damaged = bytearray(original)
    damaged[position] ^= mask
    path.write_bytes(bytes(damaged))
    try:
        faults = verify(folder)
        assert faults
        assert any(name in str(fault) for fault in faults)
        _assert_previous_is_taken(root, name)
    finally:
        path.write_bytes(original)


@pytest.mark.parametrize("keep", [0, 1, -1])
def test_any_truncated_file_is_found(root, keep):
    folder = root / "step-00000020"
    for name in _everything(folder):
        path = folder / name
        original = path.read_bytes()
        path.write_bytes(original[:keep])
        _assert_previous_is_taken(root, name)
        path.write_bytes(original)
    assert verify(folder) == []


def test_any_deleted_file_is_found(root):
    folder = root / "step-00000020"
    for name in _everything(folder):
        path = folder / name
        original = path.read_bytes()
        path.unlink()
        _assert_previous_is_taken(root, name)
        path.write_bytes(original)


def test_swapped_shards_are_both_named(root):
    folder = root / "step-00000020" / "deepspeed"
    a, b, spare = folder / "shard-0.pt", folder / "shard-1.pt", folder / "spare"
    a.rename(spare), b.rename(a), spare.rename(b)
    faults = verify(root / "step-00000020")
    assert {(f.file, f.kind) for f in faults} == {
        ("deepspeed/shard-0.pt", "swapped"),
        ("deepspeed/shard-1.pt", "swapped"),
    }
    assert "holds the content of deepspeed/shard-1.pt" in describe(faults)
    _assert_previous_is_taken(root, "shard-0")


def test_an_extra_file_is_named(root):
    (root / "step-00000020" / "deepspeed" / "stray.pt").write_bytes(b"x")
    _assert_previous_is_taken(root, "deepspeed/stray.pt")


def test_a_checkpoint_under_another_name_is_refused(root):
    (root / "step-00000020").rename(root / "step-00000030")
    choice = catalog.newest_valid(root)
    assert choice.manifest.step == 10
    assert "step 20" in choice.passed_over[0].reason


def test_manifest_and_marker_of_another_step_are_refused(root):
    for name in (layout.MANIFEST_NAME, layout.COMMIT_NAME):
        shutil.copy(root / "step-00000010" / name, root / "step-00000020" / name)
    assert verify(root / "step-00000020")
    assert catalog.newest_valid(root).manifest.step == 10


def test_the_shallow_check_reads_no_content_but_sees_sizes(root):
    path = root / "step-00000020" / "state.json"
    path.write_bytes(b"y" * path.stat().st_size)
    assert verify(root / "step-00000020", deep=False) == []
    path.write_bytes(b"y")
    (fault,) = verify(root / "step-00000020", deep=False)
    assert fault.kind == "truncated"


def test_many_faults_are_listed_in_short():
    from training.checkpoint.verify import Fault

    faults = [Fault(f"f{i}", "missing", "is missing") for i in range(5)]
    assert describe(faults) == "f0: is missing; f1: is missing; f2: is missing; and 2 more"
