"""Commands that run as one process a GPU: here with --gpus, or already started by torchrun."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from bevctl.cli.overrides import ConfigCommand
from bevctl.console import Console
from bevctl.errors import BevctlError, ExitCode

if TYPE_CHECKING:
    from bevctl.engine.dist import World
    from bevctl.engine.launch import Cluster

_WORDS = "bevctl.cli.ranks.words"


class RankedCommand(ConfigCommand):
    """Remembers its own words, for the processes that run the same command again."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_WORDS] = list(args)
        return super().parse_args(ctx, args)


def run_ranks(console: Console, cluster: Cluster, device: str, work: Callable[[World], int]) -> int:
    """`work` of this rank; or, started alone and asked for several, this command again as each of `cluster`'s ranks.

    Returns the exit code. Raises BevctlError for what cannot start, or what the decisive rank failed with; in a rank
    that was started here, the starting process tells.
    """
    from bevctl.engine.dist import world_from_environment
    from bevctl.engine.launch import check_cluster, launch, leave_outcome

    world = world_from_environment()
    if "RANK" not in os.environ and (cluster.gpus > 1 or cluster.nnodes > 1):
        check_cluster(cluster, device)
        return launch(same_command(console), cluster)
    try:
        code = work(world)
    except Exception as error:
        code = error.code if isinstance(error, BevctlError) else ExitCode.RUN_FAILED
        if console.debug or not leave_outcome(os.environ, code, error):
            raise
        return code
    leave_outcome(os.environ, code)
    return code


def same_command(console: Console, without: str = "") -> list[str]:
    """The command line that repeats the running `RankedCommand`, leaving out the word `without`."""
    context = click.get_current_context()
    words = [word for word in context.meta[_WORDS] if word != without]
    return [*(["--quiet"] if console.quiet else []), context.info_name or "", *words]
