"""From the records of a trace back to what broke first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bevctl.numerics.inputs import InputFault
from bevctl.numerics.record import Culprit, OpRecord, Source, Verdict


@dataclass(frozen=True)
class Outcome:
    """A loss or gradient that is not finite."""

    name: str
    writer: int
    """Index of the record that made it, or −1 − index of a source."""


def find_culprit(
    records: Sequence[OpRecord], sources: Sequence[Source], outcomes: Sequence[Outcome], faults: Sequence[InputFault]
) -> Culprit | None:
    """The earliest cause of a non-finite outcome; else of something that was masked; else an error; else None.

    A cause is a record whose inputs were finite and whose output is not, a source that is not finite, or memory that
    became so without an operation.
    """
    walk = _Walk(records, sources)
    reached: dict[int, list[str]] = {}
    for outcome in outcomes:
        for cause in walk.causes(outcome.writer):
            reached.setdefault(cause, []).append(outcome.name)
    masks: dict[int, OpRecord] = {}
    for record in records:
        if record.status == "masks":
            for cause in walk.undeclared_causes(record):
                masks.setdefault(cause, record)
    if not reached and not masks:
        raised = next((record for record in records if record.status == "raised"), None)
        return None if raised is None else _from_error(raised, faults)
    cause = min(reached or masks, key=walk.time)
    names = reached.get(cause, [])
    cause = _earlier_twin(cause, masks, walk) if reached else cause
    return _culprit(cause, walk, names, masks.get(cause), faults)


def _earlier_twin(cause: int, masks: Iterable[int], walk: _Walk) -> int:
    """A masked cause at the line whose backward pass broke, if there is one: it came first."""
    broken = walk.records.get(cause)
    if broken is None or broken.phase != "backward":
        return cause
    twins = [m for m in masks if m in walk.records and walk.records[m].place == broken.place]
    return min(twins, default=cause)


class _Walk:
    """Follows non-finite inputs back to where they began."""

    def __init__(self, records: Sequence[OpRecord], sources: Sequence[Source]) -> None:
        self.records, self.sources = {record.index: record for record in records}, sources
        self._known: dict[int, frozenset[int]] = {}

    def causes(self, writer: int) -> frozenset[int]:
        """Records and sources that made what `writer` gave non-finite; declared ones only if there is no other."""
        if writer not in self._known:
            found = self._search(writer)
            undeclared = frozenset(cause for cause in found if not self._declared(cause))
            self._known[writer] = undeclared or frozenset(found)
        return self._known[writer]

    def undeclared_causes(self, record: OpRecord) -> list[int]:
        """Causes of the non-finite inputs of a record that nothing excuses."""
        found = {cause for parent in record.bad_parents for cause in self.causes(parent)}
        return sorted(cause for cause in found if not self._declared(cause))

    def _search(self, writer: int) -> set[int]:
        found, seen, open_ends = set(), {writer}, [writer]
        while open_ends:
            current = open_ends.pop()
            record = self.records.get(current)
            parents = record.bad_parents if record is not None and record.status in ("inherits", "declared") else ()
            if not parents:
                found.add(current)
            for parent in parents:
                if parent not in seen:
                    seen.add(parent)
                    open_ends.append(parent)
        return found

    def _declared(self, cause: int) -> bool:
        if cause < 0:
            return bool(self.sources[-1 - cause].declared)
        return cause in self.records and self.records[cause].status == "declared"

    def time(self, cause: int) -> int:
        """Position in the trace."""
        return cause if cause >= 0 else self.sources[-1 - cause].first_use


def _culprit(
    cause: int, walk: _Walk, reached: Sequence[str], mask: OpRecord | None, faults: Sequence[InputFault]
) -> Culprit:
    source = walk.sources[-1 - cause] if cause < 0 else None
    record = walk.records[cause] if source is None else _first_reader(cause, walk)
    if source is not None:
        kind = source.kind
        verdict = Verdict("weights" if kind == "weight" else "data" if kind == "data" else "unknown", _said(source))
        samples = source.samples or None
    elif record.status == "origin":
        kind, verdict, samples = "operation", record.verdict or Verdict("unknown", "was not done again"), None
    else:
        kind, verdict, samples = "unseen", Verdict("unknown", "something that torch does not see wrote here"), None
    return Culprit(
        kind=kind,
        record=record,
        verdict=verdict,
        reached=tuple(reached),
        masked_by=mask,
        source=source,
        samples=samples,
        inherited=len(_inheriting(list(walk.records.values()), cause)),
        faults=tuple(faults),
    )


def _first_reader(cause: int, walk: _Walk) -> OpRecord:
    return next(record for record in walk.records.values() if cause in record.parents)


def _said(source: Source) -> str:
    extent = source.extent
    return f"{source.name or 'a tensor from outside the trace'} holds {extent.nan} NaN and {extent.inf} infinite values"


def _from_error(record: OpRecord, faults: Sequence[InputFault]) -> Culprit:
    kind = "data" if faults else "code"
    return Culprit("operation", record, Verdict(kind, record.note), faults=tuple(faults))


def inheritors_of(records: Sequence[OpRecord], culprit: Culprit) -> list[OpRecord]:
    """Records whose result is not finite because the culprit's was not."""
    cause = culprit.record.index
    if culprit.source is not None:
        cause = next(p for p, e in zip(culprit.record.parents, culprit.record.inputs, strict=True) if e.bad and p < 0)
    return _inheriting(records, cause)


def _inheriting(records: Sequence[OpRecord], cause: int) -> list[OpRecord]:
    tainted, found = {cause}, []
    for record in records:
        if record.status == "inherits" and not tainted.isdisjoint(record.bad_parents):
            tainted.add(record.index)
            found.append(record)
    return found
