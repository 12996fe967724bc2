"""The second command of `raising`, where the table of commands can point to it."""

from tests.cli.raising import configured as command

__all__ = ["command"]
