"""SIGTERM and SIGINT during a run: the first asks for a checkpoint, a second ends the process at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType, TracebackType
from typing import Any

from bevctl.errors import ExitCode

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_ECHO_S = 2.0
"""Under torchrun a Ctrl-C arrives twice: from the terminal and from the agent."""


class Interrupted(Exception):
    """Raised by the first signal inside `StopRequest.interruptible`."""


Interruptible = Callable[[], AbstractContextManager[None]]
"""`StopRequest.interruptible`, or nullcontext where no signal ends a block."""


class StopRequest:
    """Context manager that holds the handlers; `name` is the signal that came, empty before."""

    def __init__(self) -> None:
        self.name = ""
        self._since = 0.0
        self._interruptible = False
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        return bool(self.name)

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Marks code that may be left in the middle: waiting for data, evaluating. Raises Interrupted."""
        if self.requested:
            raise Interrupted(self.name)
        self._interruptible = True
        try:
            yield
        finally:
            self._interruptible = False

    def _handle(self, number: int, _: FrameType | None) -> None:
        if not self.requested:
            self.name = signal.Signals(number).name
            self._since = time.monotonic()
            _say(f"{self.name}: stopping with a checkpoint; a second signal ends at once.")
            if self._interruptible:
                raise Interrupted(self.name)
        elif "TORCHELASTIC_RUN_ID" not in os.environ or time.monotonic() - self._since > _ECHO_S:
            _say(f"Ended at once by {signal.Signals(number).name}.")
            os._exit(ExitCode.TERMINATED if number == signal.SIGTERM else ExitCode.INTERRUPTED)


def _say(text: str) -> None:
    """One line on stderr of the first rank: past the stream, in whose code the signal may have come."""
    if os.environ.get("RANK", "0") == "0":
        with contextlib.suppress(OSError):
            os.write(2, f"{text}\n".encode())
