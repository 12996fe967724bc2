"""Where a command's words go: results to stdout, everything else to stderr, JSON when asked for.

One `Console` is made a process and handed down; tests make their own with in-memory streams.
"""

from __future__ import annotations

import json
import numbers
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, Protocol, TextIO

from rich.console import Console as RichConsole
from rich.console import RenderableType
from rich.text import Text

import bevctl

if TYPE_CHECKING:
    from rich.live import Live

PLAIN_WIDTH = 120
"""Columns of a table that does not go to a terminal."""
PLAIN_INTERVAL_S = 10.0
"""Least time between two progress lines where nothing can be animated."""


class Progress(Protocol):
    """What the body of `with console.progress(...)` reports to."""

    def advance(self, n: int = 1) -> None: ...

    def describe(self, text: str) -> None: ...


def printable(text: str) -> str:
    r"""`text` with control characters and lone surrogates spelled out (ESC becomes `\x1b`); tab and newline stay.

    Text from logs and file names goes to the terminal through this, so that it cannot move the cursor or set colours.
    """
    encodable = text.encode("utf-8", "backslashreplace").decode()
    if encodable.isprintable():
        return encodable
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in encodable)


def table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], title: str | None = None, *, named: bool = False
) -> RenderableType:
    """A table of plain cells, none of them cut; columns whose cells are all numbers are right-aligned.

    Args:
        named: the first column holds names to copy, which stay on one line however narrow the table is.
    """
    from rich.table import Table

    cells = [list(row) for row in rows]
    grid = Table(title=title, title_justify="left", header_style="bold")
    for index, name in enumerate(columns):
        numeric = bool(cells) and all(isinstance(row[index], numbers.Number) for row in cells)
        justify: Literal["left", "right"] = "right" if numeric else "left"
        grid.add_column(name, justify=justify, overflow="fold", no_wrap=named and index == 0)
    for row in cells:
        grid.add_row(*[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row])
    return grid


def strict_json(value: Any) -> Any:
    """`value` as strict JSON allows it: see `Console.document` for what becomes of non-finite numbers."""
    return _strict(value)[0]


def _strict(value: Any) -> tuple[Any, Any]:
    """The plain value, and in its shape where it was not finite (None: nowhere)."""
    if value is None or isinstance(value, bool):
        return value, None
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode(), None
    if isinstance(value, numbers.Integral):
        return int(value), None
    if isinstance(value, numbers.Real):
        return _strict_float(float(value))
    if isinstance(value, os.PathLike):
        return _strict(os.fspath(value))
    if isinstance(value, Mapping):
        return _strict_mapping(value), None
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, bytes):
        pairs = [_strict(item) for item in value]
        marks = [mark for _, mark in pairs]
        return [item for item, _ in pairs], marks if any(mark is not None for mark in marks) else None
    raise TypeError(f"{type(value).__name__} has no place in a JSON document: {value!r:.80}")


def _strict_float(value: float) -> tuple[float | None, str | None]:
    if value != value:
        return None, "nan"
    if value in (float("inf"), float("-inf")):
        return None, "inf" if value > 0 else "-inf"
    return value, None


def _strict_mapping(value: Mapping[Any, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, item in value.items():
        plain[str(key)], mark = _strict(item)
        if mark is not None:
            plain[f"{key}_nonfinite"] = mark
    return plain


class _SafeRich(RichConsole):
    """Rich without markup, emoji or highlighting, and with control characters spelled out in every string."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **{**options, "markup": False, "emoji": False})


class Console:
    """Streams, verbosity and colour of one process.

    `color` is "auto", "always" or "never"; auto follows NO_COLOR, FORCE_COLOR, TERM=dumb and whether the stream is a
    terminal. The attributes may be changed after construction, as the command line is parsed.
    """

    def __init__(
        self,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
        *,
        json: bool = False,
        quiet: bool = False,
        verbose: int = 0,
        color: str = "auto",
        debug: bool = False,
    ) -> None:
        self.stdout = stdout or sys.stdout
        self.stderr = stderr or sys.stderr
        self.json = json
        self.quiet = quiet
        self.verbose = verbose
        self.color = color
        self.debug = debug
        self.documents = 0
        """JSON documents printed so far."""
        self._live: _SafeRich | None = None

    @property
    def is_terminal(self) -> bool:
        """Whether stderr, where progress goes, can be animated."""
        return _is_terminal(self.stderr)

    def result(self, renderable: RenderableType) -> None:
        """Print the command's result, a string or something rich can draw, on stdout; nothing in JSON mode.

        Strings inside a renderable are plain text, except that rich reads a Panel's title as markup: give that as
        `rich.text.Text(printable(title))`.
        """
        if self.json:
            return
        if isinstance(renderable, str):
            print(printable(renderable), file=self.stdout, flush=True)
        else:
            self._rich(self.stdout).print(renderable)
            self.stdout.flush()

    def document(self, command: str, body: Mapping[str, Any], status: str = "ok", *, one_line: bool = False) -> None:
        """Print the command's JSON document on stdout; nothing outside JSON mode.

        `schema`, `version`, `command` and `status` come first; of these `body` may override `status` alone. A number
        that is not finite becomes null with a sibling `<field>_nonfinite` of "nan", "inf" or "-inf" (for a list: a list
        of those). With `one_line`, for a command that prints several, each takes one line.
        Raises TypeError for a value without a JSON form.
        """
        if not self.json:
            return
        about = {"schema": f"bevctl.{command}/1", "version": bevctl.__version__, "command": command}
        assert not about.keys() & body.keys(), f"{sorted(about.keys() & body.keys())} of a document are the console's"
        indent = None if one_line else 2
        document = strict_json({**about, "status": status, **body})
        print(json.dumps(document, indent=indent, allow_nan=False), file=self.stdout, flush=True)
        self.documents += 1

    @property
    def can_redraw(self) -> bool:
        """Whether stdout takes a picture that changes in place."""
        return not self.json and _is_terminal(self.stdout)

    @property
    def width(self) -> int:
        """Columns of stdout."""
        return self._rich(self.stdout).width

    @property
    def draws_blocks(self) -> bool:
        """Whether stdout's encoding has block characters and arrows, beyond ASCII."""
        try:
            "█→●".encode(getattr(self.stdout, "encoding", None) or "ascii")
        except (UnicodeEncodeError, LookupError):
            return False
        return True

    @contextmanager
    def redrawn(self) -> Iterator[Picture]:
        """A picture on the whole of stdout's terminal, replaced in place while the body runs; needs `can_redraw`.

        What was on the terminal before comes back at the end.
        """
        from rich.live import Live

        rich = self._rich(self.stdout)
        with Live(console=rich, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:
            yield Picture(rich, live)

    def info(self, message: str) -> None:
        """Say something on stderr, unless quiet."""
        if not self.quiet:
            self._say(message)

    def detail(self, message: str) -> None:
        """Say something on stderr that only `-v` asks for."""
        if self.verbose and not self.quiet:
            self._say(message, style="dim")

    def warn(self, message: str) -> None:
        """Warn on stderr, also when quiet."""
        self._say(message, label="warning", style="yellow")

    def error(self, message: str, hint: str = "") -> None:
        """State on stderr what went wrong and what to do."""
        self._say(message, label="error", style="bold red")
        if hint:
            self._say(f"  {hint}")

    @contextmanager
    def progress(self, total: int | None, description: str) -> Iterator[Progress]:
        """Show progress on stderr while the body runs: a bar on a terminal, otherwise a line now and then.

        `total` is the number of steps, or None where it is unknown.
        """
        if self.quiet:
            yield _Silent()
        elif self.is_terminal:
            # What is said meanwhile goes through the bar's own console, which prints it above the bar.
            self._live = self._rich(self.stderr)
            try:
                with _Bar(self._live, total, description) as bar:
                    yield bar
            finally:
                self._live = None
        else:
            yield _Lines(self, total, description)

    def _say(self, message: str, *, label: str = "", style: str = "") -> None:
        text = Text(f"{label}: ", style=style) if label else Text()
        text.append(printable(message), style="" if label else style)
        self._rich(self.stderr).print(text, soft_wrap=True)
        self.stderr.flush()

    def _rich(self, stream: TextIO) -> _SafeRich:
        if self._live is not None and stream is self.stderr:
            return self._live
        terminal = _is_terminal(stream)
        return _SafeRich(
            file=stream,
            force_terminal=terminal,
            color_system=_color_system(self.color, terminal),
            no_color=False,
            highlight=False,
            markup=False,
            emoji=False,
            width=None if terminal or os.environ.get("COLUMNS") else PLAIN_WIDTH,
        )


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def _color_system(color: str, terminal: bool) -> Any:
    """Rich's name of the palette, or None for no escape codes at all."""
    if color == "never" or (color == "auto" and os.environ.get("NO_COLOR")):
        return None
    forced = os.environ.get("FORCE_COLOR", "0") not in ("", "0")
    return "standard" if color == "always" or forced or terminal else None


class Picture:
    """What the body of `with console.redrawn()` draws on."""

    def __init__(self, rich: RichConsole, live: Live) -> None:
        self._rich = rich
        self._live = live

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines of the terminal now."""
        return self._rich.size.width, self._rich.size.height

    def show(self, renderable: RenderableType) -> None:
        """Replace the picture."""
        self._live.update(renderable, refresh=True)


class _Silent:
    def advance(self, n: int = 1) -> None:
        """Quiet: nothing is shown."""

    def describe(self, text: str) -> None:
        """Quiet: nothing is shown."""


class _Bar:
    """Progress on a terminal."""

    def __init__(self, rich: RichConsole, total: int | None, description: str) -> None:
        from rich import progress as rp

        columns = (
            rp.TextColumn("{task.description}", markup=False),
            rp.BarColumn(),
            rp.MofNCompleteColumn(),
            rp.TimeRemainingColumn(),
        )
        self._progress = rp.Progress(*columns, console=rich, transient=True)
        self._task = self._progress.add_task(printable(description), total=total)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def advance(self, n: int = 1) -> None:
        self._progress.advance(self._task, n)

    def describe(self, text: str) -> None:
        self._progress.update(self._task, description=printable(text))


class _Lines:
    """Progress where nothing can be animated: a line when a tenth more is done or ten seconds passed."""

    def __init__(self, console: Console, total: int | None, description: str) -> None:
        self._console = console
        self._total = total
        self._description = description
        self._done = 0
        self._started = self._said_at = time.monotonic()
        self._said_tenth = 0

    def advance(self, n: int = 1) -> None:
        self._done += n
        now = time.monotonic()
        tenth = 10 * self._done // self._total if self._total else 0
        if tenth > self._said_tenth or now - self._said_at >= PLAIN_INTERVAL_S:
            self._said_tenth, self._said_at = tenth, now
            self._console.info(self._line(now - self._started))

    def describe(self, text: str) -> None:
        self._description = text

    def _line(self, elapsed: float) -> str:
        if not self._total:
            return f"{self._description}: {self._done} in {elapsed:.0f} s"
        left = elapsed / self._done * max(self._total - self._done, 0)
        return f"{self._description}: {self._done}/{self._total}, {elapsed:.0f} s, about {left:.0f} s left"
