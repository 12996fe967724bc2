"""`bevctl preflight`: nothing that could have been known beforehand stops a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bevctl.cli.options import ConfigRequest, config_option, config_options, json_option, precision_flags
from bevctl.cli.overrides import ConfigCommand
from bevctl.console import Console
from bevctl.errors import BevctlError, ExitCode

if TYPE_CHECKING:
    from bevctl.preflight.checks import CheckSpec, Context
    from bevctl.preflight.run import Report, Selection


class Size(click.ParamType):
    """A number of bytes: 400GB, 64GiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from bevctl.sizes import parse_size

        del param, ctx
        return value if isinstance(value, int) else parse_size(value)


class Names(click.ParamType):
    """Words with commas between them."""

    name = "names"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        del param, ctx
        return value if isinstance(value, tuple) else tuple(word.strip() for word in value.split(",") if word.strip())


@click.command("preflight", cls=ConfigCommand)
@config_options
@precision_flags
@config_option("--batch", key="train.batch", type=int, metavar="N", help="Samples per GPU and step.")
@config_option("--workers", key="train.workers", type=int, metavar="N", help="Loading processes per GPU.")
@config_option("--work-dir", key="work_dir", metavar="DIR", help="Folder of the run; default: runs/<config name>.")
@click.option("--gpus", type=click.IntRange(1), metavar="N", help="GPUs of this machine that the run will use.")
@click.option("--resume", metavar="CKPT|auto", help="The checkpoint that the run will continue from.")
@click.option("--python", metavar="EXE", help="Judge the environment of this interpreter, 3.6 or newer.")
@click.option(
    "--repo",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Checkout of the project that CONFIG belongs to; relative paths in CONFIG start there.",
)
@click.option("--min-free", type=Size(), metavar="SIZE", help="Disk space to ask for; default: what the run writes.")
@click.option("--only", type=Names(), multiple=True, metavar="ID,…", help="Only these checks, by id or section.")
@click.option("--skip", type=Names(), multiple=True, metavar="ID,…", help="Not these checks, by id or section.")
@click.option(
    "--fail-on",
    type=click.Choice(["warn", "fail"]),
    default="fail",
    help="What exit code 1 is for; default: fail.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    default=60.0,
    metavar="S",
    help="Seconds for one check; default: 60.",
)
@click.option("--deep", is_flag=True, help="Also checks that take longer, or talk to other machines.")
@click.option("--reap", is_flag=True, help="List your orphaned training processes that hold GPU memory; check nothing.")
@click.option("--pid", "pids", type=int, multiple=True, metavar="N", help="With --reap: this orphaned process.")
@click.option("--yes", is_flag=True, help="With --reap: end them, by SIGTERM, then SIGKILL.")
@click.option("-n", "--dry-run", is_flag=True, help="With --reap: end nothing, whatever else is said.")
@json_option
@click.pass_obj
def command(
    console: Console,
    request: ConfigRequest,
    gpus: int | None,
    resume: str | None,
    python: str | None,
    repo: Path | None,
    min_free: int | None,
    only: tuple[tuple[str, ...], ...],
    skip: tuple[tuple[str, ...], ...],
    fail_on: str,
    timeout: float,
    deep: bool,
    reap: bool,
    pids: tuple[int, ...],
    yes: bool,
    dry_run: bool,
) -> int:
    """Check in seconds whether the run of CONFIG will start, compute, fit and be able to save.

    CONFIG may also be a torchpack YAML or an mmcv or mmengine Python config, which is read and never run.
    """
    if reap:
        return _reap(pids, yes and not dry_run, console)
    if pids or yes or dry_run:
        raise BevctlError("--pid, --yes and --dry-run belong to --reap.", "Add --reap, or leave them out.")
    from bevctl.preflight.checks import all_checks
    from bevctl.preflight.request import build_context
    from bevctl.preflight.run import Selection
    from bevctl.preflight.text import report_lines

    table = all_checks()
    selection = Selection(_flat(only), _flat(skip))
    selection.validate(table)
    context = build_context(
        request.source,
        {key: value.value for key, value in request.given.items()},
        lambda: request.load(fallback=lambda: _resumed(request, resume)),
        gpus=gpus,
        resume=resume,
        python=python,
        repo=repo,
        min_free=min_free,
        timeout=timeout,
        deep=deep,
    )
    report = _run(table, context, selection, console)
    for line in report_lines(report):
        console.result(line)
    console.document("preflight", {"checks": [asdict(check) for check in report.checks]}, report.status)
    return report.exit_code(fail_on)


def _flat(words: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
    return tuple(word for some in words for word in some)


def _resumed(request: ConfigRequest, resume: str | None) -> Path | Mapping[str, Any] | None:
    """The config of the run that --resume continues; none where its file is broken, which is a finding of its own."""
    try:
        return request.resumed(resume)
    except BevctlError:
        return None


def _run(
    table: Mapping[str, tuple[CheckSpec, ...]], context: Context, selection: Selection, console: Console
) -> Report:
    from bevctl.preflight.run import run_checks

    if not console.is_terminal:
        return run_checks(table, context, selection)
    with console.progress(sum(map(len, table.values())), "preflight") as bar:

        def announce(spec: CheckSpec) -> None:
            bar.describe(spec.name)
            bar.advance()

        return run_checks(table, context, selection, announce)


def _reap(pids: tuple[int, ...], end: bool, console: Console) -> int:
    """Lists what would be ended, or ends it."""
    from bevctl.preflight.processes import holders
    from bevctl.preflight.reap import present_gpus, reap, reapable
    from bevctl.preflight.text import ended_line

    targets = reapable(holders(present_gpus()), pids)
    if not targets:
        console.result("No orphaned training process of yours holds GPU memory.")
        console.document("preflight", {"checks": [], "reap": []}, "pass")
        return ExitCode.OK
    for holder in targets:
        console.result(str(holder))
    listed = [
        {"pid": t.pid, "memory": {str(gpu): used for gpu, used in t.memory.items()}, "process": asdict(t.process)}
        for t in targets
        if t.process is not None
    ]
    if not end:
        console.info("Nothing was ended; --reap --yes ends them: SIGTERM, after 30 s SIGKILL.")
        console.document("preflight", {"checks": [], "reap": listed}, "fail")
        return ExitCode.FINDINGS
    ended = reap(targets)
    for outcome in ended:
        console.result(ended_line(outcome))
    done = all(outcome.gone for outcome in ended)
    body = {"checks": [], "reap": [{**entry, "ended": asdict(one)} for entry, one in zip(listed, ended, strict=True)]}
    console.document("preflight", body, "pass" if done else "fail")
    return ExitCode.OK if done else ExitCode.FINDINGS
