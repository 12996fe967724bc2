"""`bevctl config`: the resolved config and where its values come from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from bevctl.cli.options import CommandGroup, ConfigRequest, config_options, json_option
from bevctl.cli.overrides import ConfigCommand
from bevctl.console import Console

if TYPE_CHECKING:
    from bevctl.config.foreign import ForeignConfig


@click.group("config", cls=CommandGroup)
def command() -> None:
    """Show the resolved config and where its values come from."""


@command.command("show", cls=ConfigCommand)
@config_options
@click.option("--origin", is_flag=True, help="Add file and line, or the option, of each value.")
@json_option
@click.pass_obj
def show(console: Console, request: ConfigRequest, origin: bool) -> None:
    """Print CONFIG as it resolves: its base, the environment, --set and options applied.

    Of a config of another project, which is read and never run: what it asks for, and where.
    """
    from bevctl.config.render import annotated_yaml, to_dict, to_yaml

    foreign = _foreign(request)
    if foreign is not None:
        _show_foreign(foreign, console)
        return
    loaded = request.load()
    origins = {key: str(value) for key, value in loaded.origins.items()}
    console.result((annotated_yaml(loaded.config, loaded.origins) if origin else to_yaml(loaded.config)).rstrip())
    console.document("config", {"config": to_dict(loaded.config), "origins": origins})


def _foreign(request: ConfigRequest) -> ForeignConfig | None:
    """CONFIG of another project, with --set by its own keys."""
    from bevctl.config.foreign import changed, is_foreign, read_foreign
    from bevctl.external.overrides import read_overrides

    path = Path(request.source or "")
    if request.source is None or not path.is_file() or not is_foreign(path):
        return None
    return changed(read_foreign(path), dict(read_overrides(request.sets)))


def _show_foreign(config: ForeignConfig, console: Console) -> None:
    from bevctl.config.foreign_summary import summary

    facts = summary(config)
    for fact in facts:
        console.result(str(fact))
    for note in config.notes:
        console.info(note)
    told = {fact.name: fact.value for fact in facts}
    origins = {fact.name: str(fact.origin) for fact in facts if fact.origin is not None}
    console.document("config", {"config": told, "origins": origins, "notes": list(config.notes)})
