"""The page of a run in a real browser, wide and on a phone."""

from __future__ import annotations

import re
import struct
import subprocess
from pathlib import Path

import pytest

from launch.report import page
from tests.unit.launch.test_report import BEGIN, EVENTS, METRICS, STATE
from tests.unit.monitoring.tools import needs

pytestmark = [pytest.mark.system, needs("chromium")]

WIDE, PHONE = (1200, 2200), (500, 1000)
MEASURE = """
<script>
const lines = [...document.querySelectorAll("polyline")].map(line => line.getBoundingClientRect());
document.title = [document.documentElement.scrollWidth, innerWidth, lines.length,
                  Math.min(...lines.map(box => box.width))].join(" ");
</script>
"""


def chromium(file: Path, size: tuple[int, int], *arguments: str) -> str:
    command = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
    command += [f"--user-data-dir={file.parent / 'profile'}", f"--window-size={size[0]},{size[1]}", *arguments]
    outcome = subprocess.run([*command, file.as_uri()], capture_output=True, text=True, timeout=60, check=True)
    return outcome.stdout


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_the_page_in_a_browser(size: tuple[int, int], tmp_path: Path) -> None:
    text = page(STATE, METRICS, EVENTS, {"perplexity": {"4": 8.0}, "sample": "The function " * 20}, BEGIN)
    file, picture = tmp_path / "report.html", tmp_path / "report.png"
    file.write_text(text)
    chromium(file, size, f"--screenshot={picture}")
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert struct.unpack(">II", content[16:24]) == size
    empty = tmp_path / "empty.html"
    empty.write_text("<!doctype html><title>x</title>")
    chromium(empty, size, f"--screenshot={tmp_path / 'empty.png'}")
    assert len(content) > 4 * (tmp_path / "empty.png").stat().st_size, "the page is drawn"

    file.write_text(text.replace("</body>", MEASURE + "</body>"))
    found = re.search(r"<title>([\d.]+) ([\d.]+) ([\d.]+) ([\d.]+)</title>", chromium(file, size, "--dump-dom"))
    assert found
    scroll_width, window_width, lines, narrowest = map(float, found.groups())
    assert scroll_width <= window_width, "the page is wider than the screen"
    assert lines >= 8
    assert narrowest > 100
