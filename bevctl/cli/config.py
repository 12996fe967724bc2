"""`bevctl config`: the resolved config and where its values come from."""

from __future__ import annotations

import click

from bevctl.cli.options import ConfigCommand, ConfigRequest, config_options, json_option
from bevctl.console import Console


@click.group("config")
def command() -> None:
    """Show the resolved config and where its values come from."""


@command.command("show", cls=ConfigCommand)
@config_options
@click.option("--origin", is_flag=True, help="Add file and line, or the option, of each value.")
@json_option
@click.pass_obj
def show(console: Console, request: ConfigRequest, origin: bool) -> None:
    """Print CONFIG as it resolves: its base, the environment, --set and options applied."""
    from bevctl.config.render import annotated_yaml, to_dict, to_yaml

    loaded = request.load()
    origins = {key: str(value) for key, value in loaded.origins.items()}
    console.result((annotated_yaml(loaded.config, loaded.origins) if origin else to_yaml(loaded.config)).rstrip())
    console.document("config", {"config": to_dict(loaded.config), "origins": origins})
