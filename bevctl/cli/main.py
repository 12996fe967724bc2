"""The program: the table of commands, and the one place where an exception becomes an exit code."""

from __future__ import annotations

import errno
import importlib
import io
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import click
from click.shell_completion import shell_complete

import bevctl
from bevctl.cli.options import common_options, console_of
from bevctl.console import Console
from bevctl.errors import BevctlError, ExitCode, did_you_mean

COMMANDS: dict[str, tuple[str, str]] = {
    "quickstart": ("bevctl.cli.quickstart", "See it all work, with no GPU and no data: make, train, resume, evaluate."),
    "preflight": ("bevctl.cli.preflight", "Check in seconds whether a run will start, compute, fit and save."),
    "train": ("bevctl.cli.train", "Train a model, or continue a run."),
    "monitor": ("bevctl.cli.monitor", "Show what a run does, from any log: state, finish time, alarms."),
    "diagnose": ("bevctl.cli.diagnose", "Say why a run is wrong, slow, silent or out of memory, and what cures it."),
    "eval": ("bevctl.cli.eval", "Score a checkpoint: mAP, NDS, map IoU; submission file, pictures."),
    "data": ("bevctl.cli.data", "Make, prepare, check, show and measure data sets in nuScenes format."),
    "checkpoint": ("bevctl.cli.checkpoint", "Show, verify or convert a checkpoint."),
    "explain": ("bevctl.cli.explain", "Say what a finding such as GPU001 means and what to do about it."),
    "memory": ("bevctl.cli.memory", "Predict the GPU memory of training, by part, and plan what fits."),
    "bench": ("bevctl.cli.bench", "Time a training step in each precision, by part, with memory and MFU."),
    "config": ("bevctl.cli.config", "Show the resolved config and where its values come from."),
}
"""Name → (module with `command`, one line of help). A module is imported when its command runs."""

_COMPLETE = "_BEVCTL_COMPLETE"
_BAD_PATH = (
    errno.ENOENT,
    errno.EACCES,
    errno.EROFS,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
)


class Program(click.Group):
    """The commands of COMMANDS, imported when needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        if cmd_name not in self.commands:
            module = importlib.import_module(COMMANDS[cmd_name][0])
            self.commands[cmd_name] = common_options(module.command)
        return self.commands[cmd_name]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS:
            raise BevctlError(f"No command {args[0]!r}.", did_you_mean(args[0], COMMANDS))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code.value), code.meaning) for code in ExitCode])
        with formatter.section("Completion"):
            formatter.write_text("bash, and the same with zsh or fish:")
            formatter.write_text(f'eval "$({_COMPLETE}=bash_source bevctl)"')


class Terminated(BaseException):
    """SIGTERM came."""


def _say_version(context: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        console_of(context).result(f"bevctl {bevctl.__version__}")
        context.exit()


@click.command(
    "bevctl", cls=Program, context_settings={"auto_envvar_prefix": "BEVCTL", "help_option_names": ["-h", "--help"]}
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    allow_from_autoenv=False,
    callback=_say_version,
    help="Print the version.",
)
def program() -> None:
    """Train bird's-eye-view perception models in mixed precision on nuScenes-format data.

    An option of a command is also read from BEVCTL_<COMMAND>_<OPTION>, for example BEVCTL_TRAIN_BATCH.
    """


program.params.extend(common_options(click.Command("common")).params)


def main() -> None:
    """Entry point of the `bevctl` script."""
    # A stream that was closed before the start (`>&-`) is None.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    completion = os.environ.get(_COMPLETE)
    if completion:
        sys.exit(shell_complete(program, {"obj": Console()}, "bevctl", _COMPLETE, completion))
    with ended_by_sigterm():
        sys.exit(run(sys.argv[1:]))


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Lets SIGTERM end what runs like Ctrl-C, so that unfinished files go and the terminal is put back.

    A training run has handlers of its own.
    """

    def end(*_: object) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run(argv: Sequence[str], console: Console | None = None) -> int:
    """Run the command line `argv` (without the program's name) and return its exit code.

    A handler returns None or the code; what it raises is told through the console, in JSON mode as a document too.
    """
    console = console or Console()
    # Known before parsing, because a parse error must come out as JSON too.
    console.json = console.json or "--json" in argv
    try:
        # click's own `main` would answer a closed pipe itself, with the code of a finding.
        with program.make_context("bevctl", list(argv), obj=console) as context:
            result = program.invoke(context)
        console.stdout.flush()
    except click.exceptions.Exit as ending:
        return ending.exit_code
    except (Exception, KeyboardInterrupt, Terminated) as error:
        return _fail(error, _command_name(argv), console)
    return int(result) if isinstance(result, int) else ExitCode.OK


def _fail(error: BaseException, command: str, console: Console) -> int:
    """Say what went wrong and return the exit code."""
    if isinstance(error, BrokenPipeError):
        _drop_output(console)
        return ExitCode.PIPE_CLOSED
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        console.result(error.format_message())
        return ExitCode.USAGE
    if console.debug:
        import traceback

        traceback.print_exception(error, file=console.stderr)
    shown = _as_bevctl_error(error)
    console.error(shown.message, shown.hint)
    if console.json and not console.documents:
        _document_error(shown, command, console)
    return shown.code


def _document_error(error: BevctlError, command: str, console: Console) -> None:
    body = {"error": {"code": int(error.code), "message": error.message, "hint": error.hint}}
    try:
        console.document(command, body, status="error")
    except OSError:
        _drop_output(console)  # stdout itself is what failed; stderr has said so


def _as_bevctl_error(error: BaseException) -> BevctlError:
    if isinstance(error, BevctlError):
        return error
    if isinstance(error, Terminated):
        return BevctlError("Terminated.", "", ExitCode.TERMINATED)
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return BevctlError("Interrupted.", "", ExitCode.INTERRUPTED)
    if isinstance(error, click.ClickException):
        path = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "bevctl"
        return BevctlError(error.format_message(), f"`{path} --help` lists what it takes.", ExitCode.USAGE)
    if isinstance(error, MemoryError):
        return BevctlError("Out of memory.", "Use a smaller batch or fewer workers.", ExitCode.RUN_FAILED)
    if isinstance(error, OSError):
        return _os_error(error)
    message = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return BevctlError(message, "This is a defect in bevctl; --debug shows where.", ExitCode.RUN_FAILED)


def _os_error(error: OSError) -> BevctlError:
    what = f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}."
    if error.errno in _BAD_PATH:
        return BevctlError(what, "Check the path and its permissions.", ExitCode.USAGE)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return BevctlError(what, "Free some space, or write elsewhere.", ExitCode.RUN_FAILED)
    return BevctlError(what, "The operating system refused; --debug shows where.", ExitCode.RUN_FAILED)


def _command_name(argv: Sequence[str]) -> str:
    return next((word for word in argv if word in COMMANDS), "bevctl")


def _drop_output(console: Console) -> None:
    """Point stdout at nothing, so that the interpreter's flush at exit does not fail again."""
    if console.stdout is sys.stdout:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
