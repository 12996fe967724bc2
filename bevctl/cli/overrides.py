"""Overrides as other programs write them, as forms of --set."""

from __future__ import annotations

import re

import click

from bevctl.errors import BevctlError

_DOTTED = re.compile(r"--([A-Za-z_]\w*(?:\.[\w/-]+)+)(?:=(.*))?", re.DOTALL)
_ASSIGNMENT = re.compile(r"[A-Za-z_][\w./-]*=.*", re.DOTALL)


class ConfigCommand(click.Command):
    """A command that takes torchpack's `--a.b.c value` and mmcv's `--cfg-options a=1 b=2` as forms of --set.

    Only a name with a dot is an override; another unknown option stays an error.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, spell_out_overrides(args))


def spell_out_overrides(arguments: list[str]) -> list[str]:
    """The arguments with each override as `--set key=value`, in their order.

    Raises BevctlError for `--a.b.c` without a value.
    """
    spelled: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        dotted = _DOTTED.fullmatch(word)
        if word == "--":
            return [*spelled, word, *rest]
        if dotted:
            if dotted[2] is None and not rest:
                raise BevctlError(f"{word} has no value.", f"Write {word} VALUE or {word}=VALUE.")
            spelled += ["--set", f"{dotted[1]}={rest.pop(0) if dotted[2] is None else dotted[2]}"]
        elif word.partition("=")[0] == "--cfg-options":
            values = [word.partition("=")[2]] if "=" in word else []
            while rest and _ASSIGNMENT.fullmatch(rest[0]):
                values.append(rest.pop(0))
            spelled += [part for value in values for part in ("--set", value)] or [word]
        else:
            spelled.append(word)
    return spelled
