"""Dashboards: the committed JSON is what the code says, and every panel is usable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from monitoring.boards.__main__ import FOLDER, main
from tests.unit.monitoring.expressions import board_expressions, metric_names, rule_expressions, rule_names
from tests.unit.monitoring.tools import known_series

BOARDS = sorted(FOLDER.glob("*.json"))


def panels(path: Path) -> list[dict[str, Any]]:
    return [panel for panel in json.loads(path.read_text())["panels"] if panel["type"] != "row"]


def test_the_committed_json_is_what_the_code_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, capsys.readouterr().out


def test_a_board_that_was_edited_by_hand_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("monitoring.boards.__main__.FOLDER", tmp_path)
    assert main([]) == 0
    assert main(["--check"]) == 0
    edited = tmp_path / "loopworks-run.json"
    edited.write_text(edited.read_text().replace("Loss", "Lost", 1))
    (tmp_path / "stray.json").write_text("{}")
    assert main(["--check"]) == 1
    said = capsys.readouterr().out
    assert "loopworks-run.json" in said
    assert "stray.json" in said


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_boards_are_fit_for_provisioning(path: Path) -> None:
    board = json.loads(path.read_text())
    assert board["uid"] == path.stem
    assert board.get("id") is None
    assert "__inputs" not in board
    assert "${" not in path.read_text(), "an input that file provisioning does not resolve"
    for variable in board["templating"]["list"]:
        assert variable["datasource"]["uid"] == "loopworks-prometheus"
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in panels(path):
        assert panel["datasource"]["uid"] == "loopworks-prometheus", panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["targets"], panel["title"]


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_panels_do_not_overlap(path: Path) -> None:
    cells: set[tuple[int, int]] = set()
    for panel in json.loads(path.read_text())["panels"]:
        place = panel["gridPos"]
        mine = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in mine) < 24
        assert not mine & cells, panel["title"]
        cells |= mine


def test_expressions_name_only_series_that_exist() -> None:
    known = set(known_series()) | rule_names()
    for where, expression in [*board_expressions(), *rule_expressions()]:
        unknown = metric_names(expression) - known
        assert not unknown, f"{where}: {unknown}"


def test_each_series_of_ours_is_used_somewhere() -> None:
    used = set().union(*(metric_names(expression) for _, expression in [*board_expressions(), *rule_expressions()]))
    ours = {name for name in known_series() if name.startswith(("train_", "loopworks_"))}
    spare = {
        "train_steps_total",
        "train_checkpoints_total",
        "loopworks_fabric_rdma_read_bytes_total",
        "loopworks_fabric_rdma_write_bytes_total",
    }
    assert ours - used == spare
