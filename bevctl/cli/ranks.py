"""Commands that run as one process a GPU: here with --gpus, or already started by torchrun."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from bevctl.cli.options import ConfigCommand
from bevctl.console import Console
from bevctl.errors import BevctlError

if TYPE_CHECKING:
    from bevctl.engine.dist import World

_WORDS = "bevctl.cli.ranks.words"


class RankedCommand(ConfigCommand):
    """Remembers its own words, for the processes that run the same command again."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_WORDS] = list(args)
        return super().parse_args(ctx, args)


def run_ranks(console: Console, gpus: int, device: str, work: Callable[[World], int]) -> int:
    """`work` of this rank; or, started alone and asked for several GPUs, this command again on each of them.

    Returns the exit code. Raises BevctlError for what `work` raises, or fewer than `gpus` GPUs.
    """
    from bevctl.engine.dist import world_from_environment
    from bevctl.engine.launch import Cluster, check_cluster, launch, leave_outcome

    world = world_from_environment()
    if gpus > 1 and "RANK" not in os.environ:
        cluster = Cluster(gpus)
        check_cluster(cluster, device)
        context = click.get_current_context()
        quiet = ["--quiet"] if console.quiet else []
        return launch([*quiet, context.info_name or "", *context.meta[_WORDS]], cluster)
    try:
        code = work(world)
    except BevctlError as error:
        if not leave_outcome(os.environ, error.code, error.message, error.hint):
            raise
        return error.code
    leave_outcome(os.environ, code)
    return code
