"""What can go wrong, as exit codes and one exception type that carries the sentence to print."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import IntEnum


class ExitCode(IntEnum):
    """Every code that bevctl exits with; scripts rely on the numbers."""

    OK = 0
    FINDINGS = 1
    USAGE = 2
    UNKNOWN = 3
    RUN_FAILED = 4
    NONFINITE = 5
    PREEMPTED = 6
    INTERRUPTED = 130
    PIPE_CLOSED = 141
    TERMINATED = 143

    @property
    def meaning(self) -> str:
        return _MEANINGS[self]


_MEANINGS = {
    ExitCode.OK: "fine",
    ExitCode.FINDINGS: "findings at or above --fail-on",
    ExitCode.USAGE: "usage, unparsable config or unreadable input",
    ExitCode.UNKNOWN: "could not check",
    ExitCode.RUN_FAILED: "the run failed",
    ExitCode.NONFINITE: "stopped on non-finite numbers; a retry is useless",
    ExitCode.PREEMPTED: "preempted, checkpoint written: resume",
    ExitCode.INTERRUPTED: "ended by SIGINT; a training run, by a second one",
    ExitCode.PIPE_CLOSED: "the reader of the output went away",
    ExitCode.TERMINATED: "ended by SIGTERM; a training run, by a second one",
}


class BevctlError(Exception):
    """A failure the user can act on: one sentence, the next step, and the exit code.

    `message` states the cause with the offending value; `hint` says what to do next.
    """

    def __init__(self, message: str, hint: str = "", code: ExitCode = ExitCode.USAGE) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.code = code

    def __reduce__(self) -> tuple[type[BevctlError], tuple[str, str, ExitCode]]:
        # Default pickling would drop hint and code on the way out of a DataLoader worker.
        return type(self), (self.message, self.hint, self.code)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Hint naming the closest of `known`, or all of them when nothing is close."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    return f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(names)}."
