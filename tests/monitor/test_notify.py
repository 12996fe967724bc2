from __future__ import annotations

import json
import shlex
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from bevctl.errors import BevctlError
from bevctl.monitor.notify import Notifier
from bevctl.monitor.report import Report
from tests.monitor.runs import healthy, judge, make_log

NAN = float("nan")


def report(*bad: int, path: str = "run.log") -> Report:
    columns = healthy(40)
    for row in bad:
        columns["loss"][row] = NAN
    return judge(make_log(40, columns, path=Path(path)))


@pytest.fixture
def command(tmp_path: Path) -> str:
    """A command that appends what it is told to told.txt."""
    script = tmp_path / "tell.py"
    script.write_text(
        "import os, sys\n"
        f"with open({str(tmp_path / 'told.txt')!r}, 'a') as file:\n"
        "    file.write(os.environ['BEVCTL_ALARM_ID'] + ' ' + sys.stdin.read() + '\\n')\n"
    )
    return shlex.join([sys.executable, str(script)])


def told(tmp_path: Path) -> list[dict[str, Any]]:
    path = tmp_path / "told.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line.partition(" ")[2]) for line in lines]


def test_each_alarm_is_told_once_also_by_another_process(tmp_path: Path, command: str) -> None:
    for _ in range(3):
        assert Notifier(command, tmp_path / "cache").tell(report(20)) == []
    (document,) = told(tmp_path)
    assert document["alarm"]["id"] == "NAN001"
    assert document["run"] == "run.log"


def test_a_figure_that_moves_makes_no_new_alarm_but_a_worse_severity_does(tmp_path: Path, command: str) -> None:
    notifier = Notifier(command, tmp_path / "cache")
    notifier.tell(report(20))
    notifier.tell(report(20, 25))
    notifier.tell(report(38, 39))
    assert [document["alarm"]["severity"] for document in told(tmp_path)] == ["warn", "fail"]


def test_an_alarm_that_was_over_is_new_when_it_comes_back(tmp_path: Path, command: str) -> None:
    notifier = Notifier(command, tmp_path / "cache")
    for seen in (report(20), report(), report(20)):
        notifier.tell(seen)
    assert len(told(tmp_path)) == 2


def test_runs_and_targets_are_kept_apart_and_information_is_not_sent(tmp_path: Path, command: str) -> None:
    cache = tmp_path / "cache"
    Notifier(command, cache).tell(report(0))
    assert told(tmp_path) == []
    Notifier(command, cache).tell(report(20))
    Notifier(command, cache).tell(report(20, path="other.log"))
    Notifier(f"{command} again", cache).tell(report(20))
    assert len(told(tmp_path)) == 3


def test_what_could_not_be_sent_is_said_and_tried_again(tmp_path: Path) -> None:
    for target in ("/no/such/command", "false"):
        notifier = Notifier(target, tmp_path / "cache")
        for _ in range(2):
            (problem,) = notifier.tell(report(20))
            assert problem.startswith("NAN001 could not be sent to")


@pytest.mark.parametrize("target", ["", "  ", "mail 'unclosed"])
def test_what_is_no_command(target: str) -> None:
    with pytest.raises(BevctlError, match="--notify"):
        Notifier(target, Path("unused"))


def test_a_text_of_the_log_is_no_shell_command(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    hostile = report(20, path=f"$(touch {marker})`touch {marker}`; touch {marker}")
    assert Notifier("cat", tmp_path / "cache").tell(hostile) == []
    assert not marker.exists()


def test_an_address_gets_a_post(tmp_path: Path) -> None:
    bodies: list[bytes] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(204 if len(bodies) == 1 else 500)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Silence."""

    with HTTPServer(("127.0.0.1", 0), Receiver) as receiver:
        threading.Thread(target=receiver.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{receiver.server_port}/hook"
        assert Notifier(url, tmp_path / "cache").tell(report(20)) == []
        (problem,) = Notifier(url, tmp_path / "other").tell(report(20))
        receiver.shutdown()
    assert "HTTP Error 500" in problem
    assert json.loads(bodies[0])["alarm"]["id"] == "NAN001"
