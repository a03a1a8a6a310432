"""What decides where a run starts, before any node is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.cluster import ClusterRequest, what_is_wanted, with_absolute_paths
from launch.errors import UsageError
from launch.preflight import PreflightError
from launch.request import TrainRequest
from launch.runs import create_run
from launch.start import is_elsewhere, prepare
from launch.supervision import Settings, write
from training.config import load_config


def test_this_machine_can_be_drained_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOPWORKS_DRAIN_MARK", str(tmp_path / "drained"))
    request = TrainRequest(overrides=(f"run.dir={tmp_path}",))
    assert prepare(request, ClusterRequest()).plan.world_size
    (tmp_path / "drained").write_text("a new disk")
    with pytest.raises(PreflightError, match="this machine: drained: it is drained: a new disk") as caught:
        prepare(request, ClusterRequest())
    assert caught.value.exit_code == 3


def test_each_folder_of_a_mixture_is_wanted_on_the_nodes_but_neither_the_demo_nor_s3(tmp_path: Path) -> None:
    mixture = load_config(None, ["data.mixture={one: 1.0, /two: 0.5, s3://b/three: 1.0}", f"run.dir={tmp_path}"])
    wanted = what_is_wanted(mixture, ClusterRequest())
    assert wanted.data_paths == (str(Path("one").absolute()), "/two")
    assert list(with_absolute_paths(mixture).data.mixture or {}) == [*wanted.data_paths, "s3://b/three"]
    for path in ("demo", "s3://b/x"):
        assert what_is_wanted(load_config(None, [f"data.path={path}"]), ClusterRequest()).data_paths == ()
    assert what_is_wanted(load_config(None, ["data.path=/x"]), ClusterRequest()).data_paths == ("/x",)


def test_a_run_on_nodes_goes_on_there_and_other_options_need_nodes(tmp_path: Path) -> None:
    config = load_config(None, ["run.name=r", f"run.dir={tmp_path}"])
    run = create_run(config, {}, 10)
    run.update_state(phase="stopped")
    node = {"name": "n", "host": "n"}
    write(
        run.path / "nodes.json",
        Settings(nodes=[node], facts={}, min_nodes=1, most_nodes=1, restarts=3, hang_s=300, code="~/c"),
    )
    request = TrainRequest(overrides=(f"run.dir={tmp_path}",), resume="r")
    with pytest.raises(UsageError, match="goes on as the run was started"):
        prepare(request, ClusterRequest(spares="x"))


def test_a_run_under_mpirun_goes_on_under_mpirun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    run = create_run(load_config(None, ["run.name=r", f"run.dir={tmp_path}"]), {}, 10)
    run.update_state(phase="stopped")
    request = TrainRequest(overrides=(f"run.dir={tmp_path}",))
    before = ClusterRequest(backend="mpirun", restarts=2, port=29777, env=("A=b c",))
    prepare(request, before).remember(run)
    again = prepare(TrainRequest(overrides=(f"run.dir={tmp_path}",), resume="r"), ClusterRequest())
    (spec,) = again.specs(str(run.path), console=False)
    assert spec.argv[0] == "mpirun"
    assert (spec.env["A"], spec.env["MASTER_PORT"], again.restarts, again.resume) == ("b c", "29777", 2, True)
    # Started here by name, it is a run on this machine from then on.
    here = prepare(TrainRequest(overrides=(f"run.dir={tmp_path}",), resume="r"), ClusterRequest(nodes="localhost"))
    here.remember(run)
    assert not is_elsewhere(run)
