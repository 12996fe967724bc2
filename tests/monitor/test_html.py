from __future__ import annotations

import html.parser
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from bevctl.monitor.gpus import Gpu
from bevctl.monitor.html import page
from bevctl.monitor.report import Report
from bevctl.runs.records import EventRecord, Segment, ValidationRecord
from tests.monitor.runs import NOW, healthy, judge, make_log

HOSTILE = '<script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31mred\x07" onload="alert(3)'
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


def hostile_report() -> Report:
    """A run whose log text is out to harm the reader's browser and terminal."""
    columns = {**healthy(60), f"loss/{HOSTILE}/x": 1.0}
    columns["loss"] = [*columns["loss"][:50], *[float("nan")] * 10]
    data = {"cause": "exception", "role": "cause", "frames": [HOSTILE], "meaning": HOSTILE, "fix": HOSTILE}
    log = make_log(
        60,
        columns,
        path=Path(HOSTILE.replace("/", "_")),
        header={"config": HOSTILE, "env": {HOSTILE: HOSTILE}, "host": HOSTILE},
        events=[EventRecord("failure", HOSTILE, NOW, iter=3000, data=data, where=HOSTILE)],
        last_line=HOSTILE,
    )
    log.validations = [ValidationRecord(1, 1000, NOW, {HOSTILE: 0.5})]
    log.segments.append(Segment("resume", 1050, 3000, None, None))
    return judge(log, gpus=(Gpu(0, HOSTILE),))


class Tags(html.parser.HTMLParser):
    """Collects what a browser would act on."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "link", "path", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag != "path":
            assert self.open.pop() == tag


def test_the_page_shows_state_alarms_and_plots() -> None:
    report = judge(make_log(80, healthy(80, memory_gib=[18.0] * 40 + [18.5] * 40), max_iters=9000))
    text = page([report])
    for said in ("run.log", "running", "iteration 4,000 of 9,000", "<figcaption>loss</figcaption>", "memory_gib, GiB"):
        assert said in text
    assert not Tags(text).open


def test_text_from_a_log_is_shown_harmlessly() -> None:
    text = page([hostile_report()])
    seen = Tags(text)
    assert "script" not in seen.tags
    assert "img" not in seen.tags
    assert not [name for name, _ in seen.attributes if name.startswith("on")]
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "&lt;script&gt;" in text


def test_nothing_is_loaded_from_anywhere() -> None:
    text = page([judge(make_log(80, healthy(80)))])
    assert not re.search(r"(?:src|href)=\"(?!data:)", text)
    assert "url(" not in text
    assert "default-src 'none'" in text


def test_two_runs_share_their_plots() -> None:
    reports = [judge(make_log(60, healthy(60, seed=seed), path=Path(f"{seed}.log"))) for seed in (1, 2)]
    text = page(reports)
    assert text.count("<figcaption>loss") == 1
    assert "1.log" in text
    assert "2.log" in text
    assert "Medians" in text


def test_runs_of_the_same_name_are_told_apart_by_their_paths() -> None:
    reports = [judge(make_log(20, healthy(20), path=Path(folder) / "run")) for folder in ("one", "two")]
    assert "one/run, two/run" in page(reports)


def test_a_page_that_is_served_comes_again() -> None:
    report = judge(make_log(0, {}))
    assert 'http-equiv="refresh" content="10"' in page([report], 10)
    assert 'http-equiv="refresh"' not in page([report])


@contextmanager
def counting_server() -> Iterator[tuple[str, list[str]]]:
    """An address on this machine, and every path it was asked for."""
    asked: list[str] = []

    class Counter(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, format: str, *args: Any) -> None:
            """Silence."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Counter) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


def browse(tmp_path: Path, text: str, width: int, flag: str) -> str:
    """What chromium prints for a page at a width."""
    assert CHROMIUM is not None
    file = tmp_path / "page.html"
    file.write_text(text, encoding="utf-8")
    own = (f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},1400")
    command = [CHROMIUM, *FLAGS, *own, flag, file.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@needs_chromium
def test_in_a_browser_nothing_runs_and_nothing_is_asked_for(tmp_path: Path) -> None:
    with counting_server() as (address, asked):
        lures = f'<img src="{address}/img"><link rel=stylesheet href="{address}/css"><iframe src="{address}/frame">'
        columns = {**healthy(60), f"loss/{lures}/x": 1.0}
        log = make_log(60, columns, header={"config": lures, "host": lures}, last_line=lures)
        out = browse(tmp_path, page([judge(log)]), 1280, "--dump-dom")
        assert asked == []
        browse(tmp_path, f"<html>{lures}</html>", 1280, "--dump-dom")
        assert "/img" in asked
    assert "<h2>Alarms</h2>" in out
    assert not [tag for tag in Tags(out).tags if tag in ("script", "img", "iframe")]


@needs_chromium
@pytest.mark.parametrize("width", [1280, 390])
def test_in_a_browser_the_page_fills_the_width_and_no_more(tmp_path: Path, width: int) -> None:
    text = page([hostile_report()])
    picture = tmp_path / "page.png"
    browse(tmp_path, text, width, f"--screenshot={picture}")
    assert picture.stat().st_size > 20_000
    # The page's own policy lets no script run, so a copy without it measures itself.
    measured = re.sub(r"<meta http-equiv=\"Content-Security-Policy\"[^>]*>", "", text)
    script = "<script>document.title = JSON.stringify([innerWidth, document.documentElement.scrollWidth])</script>"
    title = re.search(
        r"<title>([^<]*)</title>",
        browse(tmp_path, measured.replace("</body>", f"{script}</body>"), width, "--dump-dom"),
    )
    assert title is not None
    inner, needed = json.loads(title[1])
    assert needed <= inner
