"""`python -m monitoring.boards` writes monitoring/dashboards/*.json; `--check` says which differ and exits with 1."""

from __future__ import annotations

import sys
from pathlib import Path

from monitoring.boards.content import BOARDS
from monitoring.boards.grafana import to_json

FOLDER = Path(__file__).resolve().parent.parent / "dashboards"


def main(arguments: list[str]) -> int:
    """Writes or checks the files; 0 when they are what the code says."""
    wanted = {FOLDER / f"{board.uid}.json": to_json(board) for board in BOARDS}
    if arguments == ["--check"]:
        present = {path: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.json")}
        for path in sorted(wanted.keys() | present.keys()):
            if wanted.get(path) != present.get(path):
                print(f"{path.name} is not what monitoring/boards says: run python -m monitoring.boards")
        return int(wanted != present)
    for path, text in wanted.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
