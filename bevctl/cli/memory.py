"""`bevctl memory`: what the model of a config needs."""

from __future__ import annotations

import dataclasses

import click

from bevctl.cli.options import ConfigCommand, ConfigRequest, config_options, json_option
from bevctl.console import Console, table


@click.command("memory", cls=ConfigCommand)
@config_options
@json_option
@click.pass_obj
def command(console: Console, request: ConfigRequest) -> None:
    """Count the trainable parameters of CONFIG's model, by part."""
    config = request.load().config

    from bevctl.measure.parameters import count_parameters

    counts = count_parameters(config)
    rows = [*counts.by_part.items(), ("total", counts.trainable)]
    console.result(table(["part", "trainable parameters"], rows, title=config.name))
    console.document("memory", {"parameters": dataclasses.asdict(counts)})
