"""Home-made logs: `key: value` and `key=value` beside an epoch or an iteration, JSON objects, progress bars of tqdm."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, field

from bevctl.runs.collect import Collector
from bevctl.runs.layout import FIELDS, LayoutCache, Row, is_count, is_loss, numbers
from bevctl.runs.readers.clock import STAMP, Clock
from bevctl.runs.readers.epochs import Epochs
from bevctl.runs.readers.json_lines import decode_object
from bevctl.runs.readers.names import scores
from bevctl.runs.readers.text import Place, TextLog

_NUMBER = r"-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|[+-]?(?:nan|inf|NaN|NAN|Infinity|Inf|INF)"
_EPOCH = re.compile(r"\b(?:epochs?|ep)\b\W{0,3}(\d{1,9})\b(?:\s*/\s*(\d{1,9}))?", re.ASCII | re.IGNORECASE)
_ITERATION = re.compile(
    r"\b(?:global[_ ]step|iterations?|iters?|it|steps?|batch)\b\W{0,3}(\d{1,12})\b(?:\s*/\s*(\d{1,12}))?",
    re.ASCII | re.IGNORECASE,
)
_INNER = re.compile(r"\[\s*(\d{1,12})\s*/\s*(\d{1,12})\s*\]", re.ASCII)
_PAIR = re.compile(
    rf"(?<![\w./@-])([A-Za-z][\w./@-]*(?: [A-Za-z][\w./@-]*)?)\s*[:=]\s*({_NUMBER})(?![\w:/.])", re.ASCII
)
_PAIR_WITH_MEAN = re.compile(rf"(?<![\w./@-])([A-Za-z][\w./@-]*)\s+({_NUMBER}) \(\s*(?:{_NUMBER})\)", re.ASCII)
_TQDM = re.compile(
    r"[^|]*\| *(\d{1,12})/(\d{1,12}) \[[\d:]+<[\d:?]+, *([\d.?]{1,12}) ?(s/it|it/s)(?:, *(.*?))?\]", re.ASCII
)
_ETA = re.compile(r"\beta\W{1,2}((?:\d+ days?, )?\d+:\d\d:\d\d)", re.ASCII | re.IGNORECASE)
_VALIDATION_LINE = re.compile(r"\W*(?:val|valid|validation|eval|evaluation|test)\b", re.ASCII | re.IGNORECASE)
_SCORE = re.compile(
    r"(?:val|valid|validation|test|eval)[_/. -]|(?:m?ap|nds|m?iou|acc\w*|recall\w*|precision|f1\w*|top-?\d)(?:$|[@_ ])",
    re.IGNORECASE,
)
_TRAIN_PREFIX = re.compile(r"(?:train|training|avg|average|mean)[_/ ](?=.*loss|lr)", re.IGNORECASE)
_NAMES = {"data": "data_time", "max mem": "memory", "mem": "memory"}
_NO_METRICS = frozenset(("epoch", "epochs", "ep", "iteration", "iter", "it", "step", "steps", "batch", "global_step"))
_LONGEST = 4000


@dataclass
class Line:
    """What a home-made line says."""

    epoch: int | None = None
    inner: int | None = None
    """Iteration, of the run or of the epoch."""
    count: int | None = None
    """Iterations in an epoch."""
    epochs: int | None = None
    train: dict[str, float] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)
    eta: str | None = None

    @property
    def says_something(self) -> bool:
        """Whether there is something measured, and a place in the run where it was."""
        placed = self.epoch is not None or self.inner is not None
        measured = any(is_loss(name) or FIELDS.get(name) in ("lr", "grad_norm") for name in self.train)
        return placed and (measured or bool(self.scores))


def stamp(line: str, clock: Clock) -> float | None:
    """Unix time of a line of this format."""
    found = STAMP.search(line[:60])
    return clock.time(found[0]) if found is not None else None


def recognises(line: str) -> float:
    """A half for a line with a loss beside an epoch or an iteration: other formats' lines have that too."""
    return 0.5 if parse_line(line) is not None else 0.0


def parse_line(line: str) -> Line | None:
    """What the line says; None where that has no place in a run, or nothing was measured."""
    line = line[:_LONGEST]
    if "%|" in line:
        parsed = _tqdm_line(line)
    elif line.startswith("{"):
        parsed = _json_line(line)
    else:
        parsed = _plain_line(line)
    return parsed if parsed is not None and parsed.says_something else None


def _plain_line(line: str) -> Line | None:
    parsed = Line()
    _place(parsed, line)
    if parsed.epoch is None and parsed.inner is None:
        return None
    stamped = STAMP.search(line[:60])
    text = line[stamped.end() :] if stamped is not None else line
    _sort(parsed, _pairs(text), _VALIDATION_LINE.match(text) is not None)
    eta = _ETA.search(line)
    parsed.eta = eta[1] if eta is not None else None
    return parsed


def _place(parsed: Line, text: str) -> None:
    epoch, iteration = _EPOCH.search(text), _ITERATION.search(text)
    if epoch is not None:
        parsed.epoch = int(epoch[1])
        parsed.epochs = int(epoch[2]) if epoch[2] else None
        inner = _INNER.search(text, epoch.end()) if iteration is None else None
        if inner is not None:
            parsed.inner, parsed.count = int(inner[1]), int(inner[2])
    if iteration is not None:
        parsed.inner = int(iteration[1])
        parsed.count = int(iteration[2]) if iteration[2] else None


def _pairs(text: str) -> dict[str, float]:
    pairs: dict[str, float] = {}
    for pattern in (_PAIR, _PAIR_WITH_MEAN):
        for name, value in pattern.findall(text):
            pairs.setdefault(_name(name), float(value))
    return pairs


def _name(name: str) -> str:
    """A home-made name as other formats have it."""
    lower = name.strip().lower()
    plain = _TRAIN_PREFIX.sub("", lower)
    plain = _NAMES.get(plain, plain).replace(" ", "_")
    return plain if plain in FIELDS else name.strip()


def _sort(parsed: Line, pairs: dict[str, float], is_validation: bool) -> None:
    """Splits what was measured in training from scores."""
    for name, value in pairs.items():
        if name.lower().rpartition(" ")[2] in _NO_METRICS:
            continue
        if is_validation or _SCORE.match(name):
            parsed.scores[name] = value
        else:
            parsed.train[name] = value


def _json_line(line: str) -> Line | None:
    item = decode_object(line)
    if item is None:
        return None
    known = {name: value for name, value in item.items() if is_count(value)}
    parsed = Line(epoch=known.get("epoch"))
    parsed.inner = next((known[name] for name in ("global_step", "step", "iteration", "iter") if name in known), None)
    _sort(parsed, {_name(name): value for name, value in numbers(item).items()}, is_validation=False)
    return parsed


def _tqdm_line(line: str) -> Line | None:
    title, _, bar = line.rpartition("%|")
    found = _TQDM.match(bar)
    if found is None:
        return None
    done, count, speed, unit, rest = found.groups()
    parsed = Line(inner=int(done), count=int(count))
    epoch = _EPOCH.search(title)
    if epoch is not None:
        parsed.epoch, parsed.epochs = int(epoch[1]), int(epoch[2]) if epoch[2] else None
    _sort(parsed, _pairs(rest or ""), _VALIDATION_LINE.match(title) is not None)
    with contextlib.suppress(ValueError, ZeroDivisionError):
        parsed.train.setdefault("time", float(speed) if unit == "s/it" else 1 / float(speed))
    return parsed


class Generic:
    """A `Parser` (see `bevctl.runs.readers`)."""

    def __init__(self, out: Collector, clock: Clock, place: Place) -> None:
        self._out = out
        self._clock = clock
        self._text = TextLog(out, place)
        self._layouts = LayoutCache()
        self._epochs = Epochs()
        self._shift = 0

    def jump(self, place: Place) -> None:
        self._text.jump(place)

    def feed(self, lines: list[str], number: int) -> None:
        for line in lines:
            time = stamp(line, self._clock)
            if time is not None:
                self._out.time = time
            parsed = parse_line(line)
            if parsed is None:
                self._text.plain(line, number)
            else:
                self._take(parsed)
            number += 1

    def feed_torn(self, line: str, number: int) -> bool:
        """A home-made line has no known length: half of one is only told by a number that may go on."""
        if line[-1:].isdigit() and parse_line(line) is not None and self._out.last is not None:
            self._out.left_out()
            return False
        self.feed([line], number)
        return True

    def finish(self) -> None:
        self._text.close_dump()

    def _take(self, parsed: Line) -> None:
        log = self._out.log
        if parsed.epoch == 0:
            self._shift = 1  # this log counts epochs from 0
        epoch = (parsed.epoch if parsed.epoch is not None else log.steps[-1].epoch if log.steps else 1) + self._shift
        log.max_epochs = parsed.epochs or log.max_epochs
        if parsed.inner is not None:
            iteration = self._epochs.total(epoch, parsed.inner, parsed.count)
            log.iters_per_epoch = parsed.count if parsed.epoch is not None and parsed.count else log.iters_per_epoch
        elif parsed.train or self._out.last is None:
            iteration = epoch
            log.iters_per_epoch = 1
        else:
            iteration = self._out.last.iter
        if parsed.train:
            layout = self._layouts.of(list(parsed.train))
            values = list(parsed.train.values())
            self._text.step(Row(layout, values, epoch, iteration, self._out.time, parsed.eta))
        if parsed.scores:
            self._out.validation(epoch, iteration, scores(parsed.scores))
