"""`bevctl explain`: what a finding means, how it was decided, what to do."""

from __future__ import annotations

from dataclasses import asdict

import click

from bevctl.cli.options import json_option
from bevctl.console import Console


@click.command("explain")
@click.argument("id", required=False, metavar="[ID]")
@json_option
@click.pass_obj
def command(console: Console, id: str | None) -> None:
    """Explain a finding by its ID, such as GPU001; without one, list them all."""
    from bevctl.explain import explain, explanations

    if id is None:
        for entry in explanations().values():
            console.result(f"{entry.id:<10} {entry.title}")
        console.document("explain", {"findings": [asdict(entry) for entry in explanations().values()]})
        return
    entry = explain(id)
    console.result(f"{entry.id}: {entry.title}\n")
    for heading, text in (("Meaning", entry.meaning), ("How it is decided", entry.decided), ("What to do", entry.do)):
        console.result(f"{heading}\n{_wrapped(text, console.width)}\n")
    console.document("explain", asdict(entry))


def _wrapped(text: str, width: int) -> str:
    import textwrap

    return textwrap.fill(
        text, width=min(width, 100), initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
    )
