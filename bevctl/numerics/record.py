"""What a trace says: the operations that ran, and the one that broke."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from bevctl.numerics.extent import Extent
from bevctl.numerics.inputs import InputFault
from bevctl.numerics.place import Place

VerdictKind = Literal["overflow", "underflow", "data", "weights", "code", "unknown"]
Phase = Literal["forward", "recompute", "backward", "outside"]
Status = Literal["fine", "origin", "inherits", "declared", "masks", "drops", "raised"]
SourceKind = Literal["data", "weight", "unseen"]
CulpritKind = Literal["operation", "data", "weight", "unseen"]


@dataclass(frozen=True)
class Verdict:
    """Why an operation's result is not finite, from doing it again on the same inputs in a wider format."""

    kind: VerdictKind
    """Overflow and underflow are of the number format; code: the operation is not defined for these numbers."""
    what: str
    """One sentence with numbers."""
    wide: Extent | None = None
    """The result in the wider format; None where the operation was not done again."""
    lost_in: tuple[int, ...] = ()
    """Underflow: indices of the records that rounded to zero, oldest first."""

    @property
    def is_range(self) -> bool:
        """Whether a wider number format cures it."""
        return self.kind in ("overflow", "underflow")


@dataclass(frozen=True)
class OpRecord:
    """One operation that gave floating-point numbers."""

    index: int
    """Position in the trace."""
    phase: Phase
    """recompute: a forward pass done again in the backward pass; outside: around the model."""
    op: str
    """Such as aten.mm.default."""
    node: str
    """Backward: the autograd node, such as SqrtBackward0; else ""."""
    place: Place
    inputs: tuple[Extent, ...]
    """Floating-point inputs, as they were before the operation."""
    outputs: tuple[Extent, ...] = ()
    parents: tuple[int, ...] = ()
    """Where each input came from: index of a record, or −1 − index of a source."""
    is_gradient: bool = False
    """Whether its numbers grow with the loss scale: what a backward pass makes of activations alone does not."""
    status: Status = "fine"
    """origin: finite inputs, non-finite output. inherits: neither is finite. declared: legitimately not finite.
    masks: non-finite inputs, finite output, on purpose; drops: the same by a selection that may mean something else.
    raised: ended in an error."""
    note: str = ""
    """Why it is declared, what it masks, or what it raised."""
    verdict: Verdict | None = None
    """Of an origin."""
    samples: tuple[int, ...] | None = None
    """Of an origin: positions in the batch that broke; None where the shape of the result does not tell."""

    @property
    def module(self) -> str:
        return self.place.module

    @property
    def bad_parents(self) -> tuple[int, ...]:
        """Where the non-finite inputs came from."""
        return tuple(p for p, extent in zip(self.parents, self.inputs, strict=True) if extent.bad)


@dataclass
class Source:
    """A tensor that no operation of the trace made."""

    name: str
    """batch.points[1], the name of a weight, or "" for an unknown one."""
    kind: SourceKind
    """unseen: made before the trace, or by code that torch does not see."""
    extent: Extent
    declared: str = ""
    """Why it may be not finite."""
    first_use: int = 0
    """Index of the first record that read it."""
    samples: tuple[int, ...] = ()


@dataclass(frozen=True)
class Culprit:
    """The first thing that was not finite, and what follows from it."""

    kind: CulpritKind
    """unseen: memory that changed without an operation of torch."""
    record: OpRecord
    """The operation that broke; of data and weights, the first one that read them."""
    verdict: Verdict
    reached: tuple[str, ...] = ()
    """Losses, and modules whose gradients, it made non-finite."""
    masked_by: OpRecord | None = None
    """The operation that hid it."""
    source: Source | None = None
    """The tensor, where it is data or a weight."""
    samples: tuple[int, ...] | None = None
    """Positions in the batch, None where the numbers don't tell."""
    inherited: int = 0
    """Number of later operations whose result is non-finite for no other reason."""
    lineage: tuple[int, ...] = ()
    """Of an operation of the backward pass whose inputs may have lost a number to half precision long before: records
    to `keep` in a second trace of the same step, which then knows. Empty where the verdict is final."""
    faults: tuple[InputFault, ...] = field(default=())
    """What is wrong with the data that went in."""

    @property
    def module(self) -> str:
        """Name of the innermost module; "" for the model itself."""
        return self.record.place.module

    @property
    def scopes(self) -> tuple[str, ...]:
        """The module and what it lies in, innermost first: patterns to try for `precision.fp32_modules`."""
        parts = self.module.split(".") if self.module else []
        return tuple(".".join(parts[:n]) for n in range(len(parts), 0, -1))
