"""What shows where a step broke: operation, module, file and line, ranges, samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import bevctl
from bevctl.finding import Evidence
from bevctl.numerics.extent import Extent
from bevctl.numerics.formats import short_name
from bevctl.numerics.place import Place
from bevctl.numerics.record import Culprit, OpRecord


def where_of(place: Place) -> str:
    """Module, file and line of an operation; the file below the package or the working directory."""
    file = Path(place.file)
    roots = (Path(bevctl.__file__).parents[1], Path.cwd())
    shown = next((file.relative_to(root) for root in roots if file.is_relative_to(root)), file)
    line = f"{shown}:{place.line}" if place.file else "no line known"
    return f"{place.module or 'the model itself'}, {line}"


def evidence_of(culprit: Culprit, tokens: Sequence[Sequence[str]]) -> tuple[Evidence, ...]:
    """What shows a culprit: its operation, why it broke, what it reached, how much inherits it, which samples.

    Args:
        tokens: of the step's samples, batch by batch.
    """
    said = [_operation(culprit.record)]
    if culprit.verdict.what:
        again = culprit.kind == "operation"
        said.append(Evidence("done again in a wider format" if again else "what it read", culprit.verdict.what))
    if culprit.reached:
        more = f" and {len(culprit.reached) - 6} more" if len(culprit.reached) > 6 else ""
        said.append(Evidence("it reached", ", ".join(culprit.reached[:6]) + more))
    if culprit.inherited:
        said.append(Evidence("inherited", f"{culprit.inherited} later operations are not finite for no other reason"))
    named = suspects_of(culprit, tokens)
    if len(named) < sum(map(len, tokens)):
        said.append(Evidence("samples", ", ".join(named)))
    return tuple(said)


def suspects_of(culprit: Culprit, tokens: Sequence[Sequence[str]]) -> list[str]:
    """Tokens of the samples that the numbers point at; all of the step where they do not tell.

    Of several accumulated batches it is not known which one broke: those at the same places in each are suspect.
    """
    positions = {i for fault in culprit.faults for i in fault.samples} or set(culprit.samples or ())
    named = named_samples(sorted(positions), tokens)
    return named or [token for batch in tokens for token in batch]


def named_samples(positions: Sequence[int], tokens: Sequence[Sequence[str]]) -> list[str]:
    """The tokens at some positions of each batch."""
    return [batch[i] for batch in tokens for i in positions if i < len(batch)]


def _operation(record: OpRecord) -> Evidence:
    outputs = [extent for extent in record.outputs if extent.bad] or list(record.outputs)
    inputs = "; ".join(map(_in_words, record.inputs)) or "nothing"
    kind = f"{record.phase} {record.op}{f' in {record.node}' if record.node else ''}"
    return Evidence(where_of(record.place), f"{kind}: from {inputs}, it gives {'; '.join(map(_in_words, outputs))}")


def _in_words(extent: Extent) -> str:
    """For example "float16 2x8 in -3..40000 with 2 infinite"."""
    bad = " and ".join(f"{n:,} {name}" for n, name in ((extent.nan, "NaN"), (extent.inf, "infinite")) if n)
    shape = "x".join(map(str, extent.shape)) or "scalar"
    span = f"{short_name(extent.dtype)} {shape} in {extent.low:.5g}..{extent.high:.5g}"
    return f"{span} with {bad}" if bad else span
