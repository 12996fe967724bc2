"""`bevctl diagnose`: why a run went wrong, and what cures it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bevctl.cli.newest import newest_run
from bevctl.cli.options import engine_option, json_option
from bevctl.cli.values import OUTPUT_FILE
from bevctl.console import Console
from bevctl.diagnose.topics import TOPICS
from bevctl.errors import BevctlError, did_you_mean

if TYPE_CHECKING:
    from bevctl.diagnose.report import Diagnosis

_FILE = click.Path(path_type=Path)


def _known(_: click.Context, __: click.Parameter, topic: str) -> str:
    if topic not in TOPICS:
        raise BevctlError(f"No topic {topic!r}.", did_you_mean(topic, TOPICS))
    return topic


class TopicCommand(click.Command):
    """A command whose help lists the topics."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        with formatter.section("Topics"):
            formatter.write_dl([(name, summary) for name, (_, summary) in TOPICS.items()])


@click.command("diagnose", cls=TopicCommand)
@click.argument("topic", callback=_known, metavar="TOPIC")
@click.argument("run", required=False, metavar="[RUN]", type=_FILE)
@click.option("--replay", is_flag=True, help="Run the recorded incident again, under instruments, and try remedies.")
@click.option("--against", metavar="RUN", type=_FILE, help="The run to compare with.")
@click.option(
    "--write-fix", metavar="FILE", type=OUTPUT_FILE, help="Write the settings that cure it, for train --set FILE."
)
@click.option("--source", metavar="DIR", type=_FILE, help="The model's source code; it is read, never run.")
@click.option("--config", metavar="CONFIG", help="The run's config, where its folder holds none.")
@click.option("--checkpoint", metavar="CKPT", type=_FILE, help="A checkpoint to examine.")
@click.option(
    "--bench", metavar="FILE", type=_FILE, multiple=True, help="A `bevctl bench --json` document; repeatable."
)
@click.option(
    "--forecast", is_flag=True, help="Of a healthy run: what FP16 could not hold, and the settings that help."
)
@click.option(
    "--profile",
    type=click.IntRange(1),
    metavar="N",
    help="no-speedup: profile N steps of the config, and try remedies.",
)
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="Where to compute; default: auto."
)
@engine_option("bevctl", "mmdet3d")
@click.option(
    "--fail-on",
    type=click.Choice(["info", "warn", "fail"]),
    default="warn",
    help="Least severity that exits 1; default: warn.",
)
@json_option
@click.pass_obj
def command(
    console: Console,
    topic: str,
    run: Path | None,
    replay: bool,
    against: Path | None,
    write_fix: Path | None,
    source: Path | None,
    config: str | None,
    checkpoint: Path | None,
    bench: tuple[Path, ...],
    forecast: bool,
    profile: int | None,
    device: str,
    fail_on: str,
) -> int:
    """Say why a run went wrong and what cures it.

    RUN is the folder of a run, a log of any project, or an incident's folder; without one (and without --checkpoint),
    the newest run below runs/ is taken. Exit code 1: a cause was found; 0: all is well; 3: inconclusive.
    """
    from bevctl.diagnose.report import DiagnoseRequest, document, exit_code
    from bevctl.diagnose.screen import picture
    from bevctl.diagnose.topics import diagnose
    from bevctl.finding import Severity

    _check(topic, replay, forecast, bench)
    if profile is not None and topic != "no-speedup":
        raise BevctlError("--profile belongs to `diagnose no-speedup`.", "Leave it out.")
    if run is None and checkpoint is None and not bench and (profile is None or config is None):
        run = newest_run(console)
    request = DiagnoseRequest(
        run=run,
        replay=replay,
        against=against,
        source=source,
        config=config,
        checkpoint=checkpoint,
        forecast=forecast,
        bench=bench,
        profile=profile,
        device=device,
        say=console.info,
    )
    answer = diagnose(topic, request)
    console.result(picture(topic, answer, console.width))
    console.document("diagnose", document(topic, answer))
    if write_fix is not None:
        _write_fix(console, write_fix, answer, run)
    return exit_code(answer, Severity(fail_on))


def _check(topic: str, replay: bool, forecast: bool, bench: tuple[Path, ...]) -> None:
    """Refuses at once what would fail or be ignored after minutes of work."""
    if topic != "nan" and (replay or forecast):
        raise BevctlError(f"--{'replay' if replay else 'forecast'} belongs to `diagnose nan`.", "Leave it out.")
    if bench and topic != "no-speedup":
        raise BevctlError("--bench belongs to `diagnose no-speedup`.", "Leave it out.")
    if replay and forecast:
        raise BevctlError("--replay contradicts --forecast, which is for a healthy run.", "Give one of them.")


def _write_fix(console: Console, path: Path, answer: Diagnosis, run: Path | None) -> None:
    from bevctl.diagnose.fix import write_fix

    remedies = write_fix(path, answer.findings)
    if not remedies:
        console.warn(f"{path} was not written: no finding has a setting that may cure it.")
        return
    unproven = sum(remedy.verified is None for remedy in remedies)
    console.info(f"Wrote {path}{f' ({unproven} of {len(remedies)} settings not tried)' if unproven else ''}")
    if run is not None and (run / "config.yaml").is_file():
        resume = next((remedy.resume for remedy in remedies if remedy.resume != "auto"), "auto")
        console.info(_command(run, path, resume))


def _command(run: Path, path: Path, resume: str) -> str:
    """How the run goes on with the settings in `path`."""
    if not resume:
        words = ["bevctl", "train", str(run / "config.yaml"), "--work-dir", f"{run}_2", "--set", str(path)]
        return f"Start anew with it: {shlex.join(words)}"
    words = ["bevctl", "train", "--work-dir", str(run), "--resume", resume, "--set", str(path)]
    return f"Continue with it: {shlex.join(words)}"
