"""From the records of a trace back to what broke first."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bevctl.numerics.formats import HALF
from bevctl.numerics.inputs import InputFault
from bevctl.numerics.recent import DEPTH
from bevctl.numerics.record import Culprit, CulpritKind, OpRecord, Source, SourceKind, Verdict, VerdictKind

GRADIENT = "gradient of "
_SOURCE_VERDICTS: dict[SourceKind, VerdictKind] = {"data": "data", "weight": "weights", "unseen": "unknown"}


@dataclass(frozen=True)
class Outcome:
    """A loss or gradient that is not finite."""

    name: str
    writer: int
    """Index of the record that made it, or −1 − index of a source."""


def find_culprit(
    records: Sequence[OpRecord],
    sources: Sequence[Source],
    outcomes: Sequence[Outcome],
    faults: Sequence[InputFault],
    failed: bool,
) -> Culprit | None:
    """The earliest cause of a non-finite outcome; else of something that was masked; else one beside the model.

    A cause is a record whose inputs were finite and whose output is not, a source that is not finite, or memory that
    became so without an operation. `failed`: the step ended in an error.
    """
    walk = _Walk(records, sources)
    reached: dict[int, list[str]] = {}
    for outcome in outcomes:
        for cause in walk.causes(outcome.writer):
            reached.setdefault(cause, []).append(outcome.name)
    masks = _masked(walk, faults)
    if not reached and not masks:
        return _beside_the_model(walk, faults, failed)
    cause = min(reached or masks, key=walk.time)
    names = reached.get(cause, [])
    cause = _earlier_twin(cause, masks, walk) if reached else cause
    return _culprit(cause, walk, names, masks.get(cause), faults)


def _masked(walk: _Walk, faults: Sequence[InputFault]) -> dict[int, OpRecord]:
    """Causes that were hidden, and the first record that hid each.

    What a mere selection leaves out counts where it is faulty data: much code divides first and selects then.
    """
    masks: dict[int, OpRecord] = {}
    for record in walk.records.values():
        if record.status in ("masks", "drops"):
            for cause in walk.undeclared_causes(record):
                if record.status == "masks" or walk.is_of_data(cause, faults):
                    masks.setdefault(cause, record)
    return masks


def _earlier_twin(cause: int, masks: Iterable[int], walk: _Walk) -> int:
    """A masked cause at the line whose backward pass broke, if there is one: it came first."""
    broken = walk.records.get(cause)
    if broken is None or broken.phase != "backward":
        return cause
    twins = [m for m in masks if m in walk.records and walk.records[m].place == broken.place]
    return min(twins, default=cause)


def _beside_the_model(walk: _Walk, faults: Sequence[InputFault], failed: bool) -> Culprit | None:
    """An operation that ended in an error, or one of the training loop, such as a norm of gradients that overflows."""
    raised = [record for record in walk.records.values() if record.status == "raised"]
    if failed and raised:
        verdict = Verdict("data" if faults else "code", raised[-1].note)
        return Culprit("operation", raised[-1], verdict, faults=tuple(faults))
    for record in walk.records.values():
        if record.status == "origin" and record.phase == "outside":
            return _culprit(record.index, walk, (), None, faults)
    return None


class _Walk:
    """Follows what is not finite from where it began."""

    def __init__(self, records: Sequence[OpRecord], sources: Sequence[Source]) -> None:
        self.records, self.sources = {record.index: record for record in records}, sources
        self._causes: dict[int, frozenset[int]] = {}
        for record in records:
            parents = record.bad_parents if record.status in ("inherits", "declared") else ()
            reaching = frozenset[int]().union(*(self.causes(parent) for parent in parents))
            self._causes[record.index] = reaching or frozenset([record.index])

    def causes(self, writer: int) -> frozenset[int]:
        """Records and sources because of which what `writer` gave is not finite; declared ones only among their own."""
        found = self._causes.get(writer, frozenset([writer]))
        undeclared = frozenset(cause for cause in found if not self._declared(cause))
        return undeclared or found

    def undeclared_causes(self, record: OpRecord) -> list[int]:
        """Causes of the non-finite inputs of a record that nothing excuses."""
        found = {cause for parent in record.bad_parents for cause in self.causes(parent)}
        return sorted(cause for cause in found if not self._declared(cause))

    def inheritors(self, cause: int) -> list[OpRecord]:
        """Later records that are not finite because of `cause`."""
        return [r for r in self.records.values() if r.status == "inherits" and cause in self._causes[r.index]]

    def is_of_data(self, cause: int, faults: Sequence[InputFault]) -> bool:
        """Whether a cause is faulty data, or comes from it."""
        return not self.inputs_of(cause).isdisjoint(fault.name for fault in faults)

    def inputs_of(self, cause: int) -> set[str]:
        """Names of the data that a record or source was computed from."""
        names: set[str] = set()
        seen, open_ends = {cause}, [cause]
        while open_ends:
            current = open_ends.pop()
            if current < 0:
                source = self.sources[-1 - current]
                names.update({source.name} if source.kind == "data" else ())
                continue
            fresh = [p for p in self.records[current].parents if p not in seen] if current in self.records else []
            seen.update(fresh)
            open_ends += fresh
        return names

    def half_lineage(self, record: OpRecord) -> tuple[int, ...]:
        """Records up to DEPTH operations before a record, if one of them computed in half precision."""
        level, found = {record.index}, set[int]()
        for _ in range(DEPTH):
            level = {p for index in level for p in self.records[index].parents if p in self.records} - found
            found |= level
        half = any(extent.dtype in HALF for index in found for extent in self.records[index].outputs)
        return tuple(sorted(found)) if half else ()

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
    loss_is_bad = any(not name.startswith(GRADIENT) for name in reached)
    found = _of_source(cause, walk) if cause < 0 else _of_record(walk.records[cause], walk, faults)
    return dataclasses.replace(
        found,
        reached=tuple(reached),
        masked_by=None if loss_is_bad else mask,
        inherited=len(walk.inheritors(cause)),
        faults=tuple(faults),
    )


def _of_source(cause: int, walk: _Walk) -> Culprit:
    source = walk.sources[-1 - cause]
    # The first record that read something non-finite of it.
    record = next(record for record in walk.records.values() if cause in record.bad_parents)
    verdict = Verdict(_SOURCE_VERDICTS[source.kind], _said(source))
    return Culprit(source.kind, record, verdict, source=source, samples=source.samples or None)


def _of_record(record: OpRecord, walk: _Walk, faults: Sequence[InputFault]) -> Culprit:
    verdict, samples = _judged_with_data(record, walk, faults)
    kind: CulpritKind = "operation" if record.status == "origin" else "unseen"
    open_question = record.phase == "backward" and verdict.kind == "code"
    return Culprit(kind, record, verdict, samples=samples, lineage=walk.half_lineage(record) if open_question else ())


def _judged_with_data(
    record: OpRecord, walk: _Walk, faults: Sequence[InputFault]
) -> tuple[Verdict, tuple[int, ...] | None]:
    """An operation's verdict and samples, where its inputs come from faulty data that of the data."""
    own = record.verdict or Verdict("unknown", "memory changed without an operation that torch sees")
    if record.phase == "backward":
        return own, record.samples
    names = walk.inputs_of(record.index)
    guilty = [fault for fault in faults if fault.name in names]
    if guilty:
        samples = sorted({sample for fault in guilty for sample in fault.samples})
        return dataclasses.replace(own, kind="data", what=f"{guilty[0].what}; {own.what}"), tuple(samples)
    indices = {int(index) for name in names for index in re.findall(r"\[(\d+)\]", name)}
    return own, tuple(indices) if record.samples is None and len(indices) == 1 else record.samples


def _said(source: Source) -> str:
    extent = source.extent
    return f"{source.name or 'a tensor from outside the trace'} holds {extent.nan} NaN and {extent.inf} infinite values"


def inheritors_of(records: Sequence[OpRecord], sources: Sequence[Source], culprit: Culprit) -> list[OpRecord]:
    """Records whose result is not finite because the culprit's was not."""
    cause = (
        culprit.record.index
        if culprit.source is None
        else -1 - next(i for i, source in enumerate(sources) if source is culprit.source)
    )
    return _Walk(records, sources).inheritors(cause)
