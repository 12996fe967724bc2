"""`bevctl monitor`: the state of any run at a glance, from its log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bevctl.cli.newest import newest_run
from bevctl.cli.options import json_option
from bevctl.cli.values import OUTPUT_FILE
from bevctl.console import Console
from bevctl.errors import BevctlError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from bevctl.monitor.report import Report


@click.command("monitor")
@click.argument("runs", nargs=-1, metavar="[RUN|LOG]...")
@click.option("--since", metavar="WHEN", help="Only what is newer: 90s, 30m, 1h, 2d ago, or a timestamp.")
@click.option("--until", metavar="WHEN", help="Only what is older; as --since.")
@click.option("--from-end", is_flag=True, help="Durations count back from the last line of the log, not from now.")
@click.option("--follow", "-f", is_flag=True, help="Keep looking until the run is over; Ctrl-C ends it.")
@click.option("--once", is_flag=True, help="Look once (the default).")
@click.option("--html", "page_file", metavar="FILE", type=OUTPUT_FILE, help="Write one page of it all.")
@click.option(
    "--serve", metavar="HOST:PORT", help="Serve the page, and /metrics for Prometheus; :PORT is loopback only."
)
@click.option("--expect", "expect", multiple=True, metavar="KEY=LO:HI", help="Range a metric should be in; repeatable.")
@click.option("--against", metavar="RUN", help="The FP32 run to compare with: lost heads, FP16 without effect.")
@click.option("--notify", metavar="CMD|URL", help="Tell of each new alarm once: its JSON on stdin, or as a POST.")
@click.option(
    "--interval", type=click.FloatRange(min=0.1), default=2.0, metavar="S", help="Seconds between looks; default: 2."
)
@click.option(
    "--fail-on",
    type=click.Choice(["info", "warn", "fail"]),
    default="fail",
    help="Least severity that exits 1; default: fail.",
)
@json_option
@click.pass_obj
def command(
    console: Console,
    runs: tuple[str, ...],
    since: str | None,
    until: str | None,
    from_end: bool,
    follow: bool,
    once: bool,
    page_file: Path | None,
    serve: str | None,
    expect: tuple[str, ...],
    against: str | None,
    notify: str | None,
    interval: float,
    fail_on: str,
) -> int:
    """Show what a run does, judge it, and say when it will be done.

    RUN is the folder of a run (of bevctl, mmcv, mmengine or OpenPCDet); LOG any log of one, TensorBoard files included.
    Several are compared; without one, the newest run below runs/ is shown. Exit code 1: an alarm of severity fail
    stands; 3: nothing in the log to judge.
    """
    from bevctl.finding import Severity
    from bevctl.monitor.report import exit_code, expected
    from bevctl.monitor.watch import Question, Watch, read_against

    if once and (follow or serve is not None):
        raise BevctlError("--once contradicts --follow and --serve.", "Leave it out.")
    ranges = expected(dict(_split(text) for text in expect))
    question = Question(since, until, from_end, ranges, read_against(against) if against else None)
    send = _notifier(notify)
    watches = [Watch(path, question) for path in runs or (newest_run(console),)]

    def look() -> list[Report]:
        return [watch.look() for watch in watches]

    def tell(reports: Sequence[Report]) -> None:
        for problem in (problem for report in reports for problem in send(report)):
            console.warn(problem)
        if page_file:
            _write_page(reports, page_file)

    if serve is not None:
        reports = _serve(console, serve, look, tell, interval)
    elif follow:
        reports = _follow(console, look, tell, interval)
    else:
        reports = look()
        tell(reports)
        _document(console, reports)
    _say_notes(console, reports)
    if page_file:
        console.info(f"Wrote {page_file}")
    console.result(_picture(console, reports, console.width))
    return exit_code(reports, Severity(fail_on))


def _split(text: str) -> tuple[str, str]:
    name, separator, span = text.partition("=")
    if not separator or not name:
        raise BevctlError(f"--expect {text!r} is not KEY=LO:HI.", "For example --expect memory_gib=18:20.")
    return name.strip(), span


def _notifier(target: str | None) -> Callable[[Report], list[str]]:
    """What sends new alarms and returns what went wrong with it."""
    if target is None:
        return lambda _: []
    from bevctl.monitor.notify import Notifier

    return Notifier(target).tell


def _say_notes(console: Console, reports: Sequence[Report]) -> None:
    for report in reports:
        for note in report.log.notes:
            console.info(f"{report.name}: {note}")


def _document(console: Console, reports: Sequence[Report], one_line: bool = False) -> None:
    from bevctl.monitor.report import overall

    if len(reports) == 1:
        console.document("monitor", reports[0].document(), one_line=one_line)
    else:
        body = {"status": overall(reports), "runs": [report.document() for report in reports]}
        console.document("monitor", body, one_line=one_line)


def _picture(console: Console, reports: Sequence[Report], width: int, height: int | None = None) -> RenderableType:
    from bevctl.monitor.compare import comparison
    from bevctl.monitor.screen import Screen

    plain = not console.draws_blocks
    if len(reports) == 1:
        return Screen(reports[0], plain, height)
    return comparison(reports, width, plain)


def _follow(
    console: Console, look: Callable[[], list[Report]], tell: Callable[[Sequence[Report]], None], interval: float
) -> Sequence[Report]:
    from bevctl.monitor.follow import Follower

    return Follower(
        console,
        look,
        draw=lambda reports, width, height: _picture(console, reports, width, height),
        document=lambda reports: _document(console, reports, one_line=True),
        tell=tell,
        interval_s=interval,
    ).run()


def _serve(
    console: Console,
    address: str,
    look: Callable[[], list[Report]],
    tell: Callable[[Sequence[Report]], None],
    interval: float,
) -> Sequence[Report]:
    import threading

    from bevctl.monitor.server import MonitorServer, parse_address

    with MonitorServer(parse_address(address), look) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        console.info(f"Serving {server.url} and {server.url}metrics; Ctrl-C ends it")
        try:
            while True:
                tell(server.reports())
                threading.Event().wait(interval)
        except KeyboardInterrupt:
            server.shutdown()
        return server.reports()


def _write_page(reports: Sequence[Report], path: Path) -> None:
    from bevctl.files import atomic_write_text
    from bevctl.monitor.html import page

    atomic_write_text(path, page(reports))
