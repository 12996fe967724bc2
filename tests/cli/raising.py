"""A command that ends in every way a command can, for the tests of the program."""

from __future__ import annotations

import errno
import os
import signal

import click

from bevctl.cli.options import ConfigRequest, config_option, config_options, json_option
from bevctl.cli.overrides import ConfigCommand
from bevctl.console import Console
from bevctl.errors import BevctlError, ExitCode


def _os_error(number: int, path: str | None = None) -> OSError:
    return OSError(number, os.strerror(number), path)


FAILURES: dict[str, BaseException] = {
    "bevctl": BevctlError("The run failed.", "Look at it.", ExitCode.RUN_FAILED),
    "nonfinite": BevctlError("The loss is NaN.", "", ExitCode.NONFINITE),
    "interrupt": KeyboardInterrupt(),
    "abort": click.Abort(),
    "usage": click.UsageError("Not so."),
    "file": click.FileError("a.txt", "is odd"),
    "pipe": BrokenPipeError(errno.EPIPE, "Broken pipe"),
    "memory": MemoryError(),
    "absent": _os_error(errno.ENOENT, "a\x1b[31m.txt"),
    "full": _os_error(errno.ENOSPC),
    "network": _os_error(errno.ECONNREFUSED),
    "defect": RuntimeError("two\nlines"),
}


@click.command("raising", cls=ConfigCommand)
@click.argument("how")
@click.option("--document/--no-document", default=False)
@json_option
@click.pass_obj
def command(console: Console, how: str, document: bool) -> int:
    """Raise, or return the number."""
    if document:
        console.document("raising", {})
    if how in FAILURES:
        raise FAILURES[how]
    if how == "sigterm":
        os.kill(os.getpid(), signal.SIGTERM)
    if how == "exit":
        click.get_current_context().exit(ExitCode.PREEMPTED)
    return int(how)


@click.command("configured", cls=ConfigCommand)
@config_options
@config_option("--batch", key="train.batch", type=int, help="Samples per GPU.")
@config_option("--fp16", key="precision.dtype", is_flag=True, flag_value="fp16", help="Half precision.")
@config_option("--fp32", key="precision.dtype", is_flag=True, flag_value="fp32", help="Single precision.")
@config_option("--log-interval", key="train.log_interval", type=int, help="Iterations between lines.")
@config_option("--warmup", key="optim.warmup", type=int, help="Iterations of warm-up.")
@config_option("--lr", key="optim.lr", along={"optim.lr_scaling": "none"}, type=float, help="Peak rate.")
@config_option("--lr-scaling", key="optim.lr_scaling", help="Rule.")
@config_option("--twice", key="train.accumulate", meaning=lambda n: 2 * n, type=int, help="Half of the batches.")
@json_option
@click.pass_obj
def configured(console: Console, request: ConfigRequest) -> None:
    """Show a few resolved values."""
    config = request.load().config
    console.result(
        f"{config.train.batch} {config.precision.dtype} {config.train.log_interval} {config.optim.warmup} "
        f"{config.device} {config.optim.lr}"
    )
    console.detail(f"{config.optim.lr_scaling} {config.train.accumulate}")
