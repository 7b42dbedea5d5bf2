"""Reports in a real browser: no logged message, every figure, and nothing wider than a phone, tablet or screen.

Debian's chromium is found on PATH (`apt-get install chromium`); TULA_REQUIRE_BROWSER=1 makes its absence a failure.
"""

from __future__ import annotations

import functools
import html
import http.server
import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.run_factory import make_run, pages_alone
from tula_hpc.analysis.figures.all import FIGURES
from tula_hpc.analysis.report.page import write_report
from tula_hpc.analysis.report.several.runs_page import write_runs_report

pytestmark = pytest.mark.processes

# a phone, a tablet, a screen
WIDTHS = (360, 768, 1280)
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PAGES = ("report.html", "runs.html")
# A page that shows each report in a frame of each width, opens what is folded, and writes down what it finds.
MEASURE = """<!DOCTYPE html><meta charset="utf-8"><link rel="icon" href="data:,"><body><script>
const frames = [], found = [];
for (const page of PAGES) for (const width of WIDTHS) {
  const frame = document.createElement("iframe");
  Object.assign(frame, {src: page, width, height: 900, style: "border: 0"});
  frames.push(new Promise(done => frame.onload = () => {
    const inner = frame.contentDocument, root = inner.documentElement;
    const wide = () => [...inner.querySelectorAll("body *")].filter(e => !e.closest(".scroll, pre, svg, details") &&
      e.getBoundingClientRect().right > width + 1).map(e => e.tagName + "." + e.className);
    const closed = root.scrollWidth;
    inner.querySelectorAll("details").forEach(e => e.open = true);
    const cut = [...inner.querySelectorAll(".scroll")].filter(e => !e.closest("details") &&
      e.scrollWidth > e.clientWidth + 1).map(e => e.innerText.slice(0, 40));
    found.push({page, width, closed, open: root.scrollWidth, wide: wide(), cut,
      figures: [...inner.querySelectorAll("figure svg")].map(e => {
        const box = e.getBoundingClientRect(), label = e.getAttribute("aria-label");
        return {label, height: box.height, width: box.width,
                described: !!inner.getElementById(e.getAttribute("aria-describedby"))};
      }), tables: inner.querySelectorAll("figure details table").length,
      size: parseFloat(getComputedStyle(inner.body).fontSize), text: inner.body.innerText.length});
    done();
  }));
  document.body.append(frame);
}
Promise.all(frames).then(() => {
  const pre = document.createElement("pre"); pre.id = "found"; pre.textContent = JSON.stringify(found);
  document.body.replaceChildren(pre);
});
</script>"""


def browser() -> str:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None and os.environ.get("TULA_REQUIRE_BROWSER") == "1":
        pytest.fail("TULA_REQUIRE_BROWSER=1, but there is no chromium on PATH", pytrace=False)
    if found is None:
        pytest.skip("there is no chromium on PATH (apt-get install chromium)")
    return found


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """A server of a folder's files that logs no requests."""

    def log_message(self, *_: object) -> None:
        pass


class BrowserOutput(NamedTuple):
    """What the browser found, and the messages that it logged."""

    frames: list[dict[str, Any]]
    messages: list[str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("browser")
    first, second = make_run(root / "first"), make_run(root / "second", stage="plan", seed=1)
    with pages_alone():
        write_report(first)
        write_runs_report([first, second])
    measure = MEASURE.replace("PAGES", json.dumps(PAGES)).replace("WIDTHS", json.dumps(WIDTHS))
    (first.report / "measure.html").write_text(measure)
    return first.report


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    """Files from one server may look into one another's frames; those opened from the disk may not."""
    handler = functools.partial(QuietHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture(scope="module")
def seen(address: str, tmp_path_factory: pytest.TempPathFactory) -> BrowserOutput:
    profile = tmp_path_factory.mktemp("profile")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--user-data-dir={profile}"]
    command = [browser(), *options, "--timeout=60000", "--virtual-time-budget=20000", "--dump-dom"]
    done = subprocess.run(
        [*command, f"{address}/measure.html"], capture_output=True, text=True, timeout=300, check=False
    )
    match = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert match, done.stderr[-2000:]
    messages = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return BrowserOutput(json.loads(html.unescape(match[1])), messages)


def test_the_browser_logs_no_message(seen: BrowserOutput) -> None:
    assert seen.messages == []
    assert {(frame["page"], frame["width"]) for frame in seen.frames} == {
        (page, width) for page in PAGES for width in WIDTHS
    }


def test_no_page_is_wider_than_its_window(seen: BrowserOutput) -> None:
    for frame in seen.frames:
        assert frame["wide"] == [], (frame["page"], frame["width"])
        assert frame["closed"] <= frame["width"], (frame["page"], frame["width"])
        assert frame["open"] <= frame["width"], (frame["page"], frame["width"])


def test_nothing_is_cut_on_a_screen_and_no_figure_on_a_phone(seen: BrowserOutput) -> None:
    for frame in seen.frames:
        assert all(figure["width"] <= frame["width"] for figure in frame["figures"])
        assert frame["cut"] == [] or frame["width"] < 1280


def test_every_figure_is_there_with_its_words_and_numbers(seen: BrowserOutput) -> None:
    for frame in seen.frames:
        expected = len(FIGURES) if frame["page"] == "report.html" else 1
        assert len(frame["figures"]) == frame["tables"] == expected
        for figure in frame["figures"]:
            assert figure["height"] > 75
            assert figure["width"] > 300
            assert figure["label"]
            assert figure["described"]


def test_text_is_large_enough_on_a_phone(seen: BrowserOutput) -> None:
    for frame in seen.frames:
        assert frame["size"] >= 16
        assert frame["text"] > 200
