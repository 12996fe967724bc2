"""What became of each entry of a state dict when its weights were loaded, and whether that is enough."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from bevctl.errors import BevctlError
from bevctl.models.build import PARTS

FATES = ("loaded", "reshaped", "missing", "unexpected", "mismatched")
_MOST_PREFIXES = 8


@dataclass(frozen=True)
class LoadReport:
    """Names of entries by what became of them."""

    source: str
    """The file."""
    layout: str
    loaded: list[str]
    reshaped: list[str]
    """Those of `loaded` whose values were reordered, negated or resized on the way."""
    missing: list[str]
    """Entries of the model that the file lacks: they keep their initial values."""
    unexpected: list[str]
    """Entries of the file that the model has no place for."""
    mismatched: list[str]
    """Entries of both whose shape differs: not loaded."""
    notes: list[str]

    @property
    def share_of_file(self) -> float:
        """Share of the file's entries that were loaded, 0..1."""
        return len(self.loaded) / max(1, len(self.loaded) + len(self.unexpected) + len(self.mismatched))

    @property
    def share_of_model(self) -> float:
        """Share of the model's entries that were loaded, 0..1."""
        return len(self.loaded) / max(1, len(self.loaded) + len(self.missing) + len(self.mismatched))

    def sentences(self) -> list[str]:
        """What to tell the user: the counts, in all and by part, then what did not fit."""
        reshaped = f", {len(self.reshaped)} of them reshaped" if self.reshaped else ""
        parts = ", ".join(f"{part} {fates['loaded']} of {_wanted(fates)}" for part, fates in self.by_part().items())
        lines = [f"Loaded {len(self.loaded)} entries ({self.layout} layout){reshaped}: {parts}"]
        for kind in ("missing", "unexpected", "mismatched"):
            names: list[str] = getattr(self, kind)
            if names:
                lines.append(f"{len(names)} {kind}: {by_prefix(names)}")
        return lines + self.notes

    def by_part(self) -> dict[str, dict[str, int]]:
        """Entries of each part of the model, and of everything else under "other", by what became of them."""
        counts = {part: dict.fromkeys(FATES, 0) for part in (*PARTS, "other")}
        for fate in FATES:
            for name in getattr(self, fate):
                counts[part_of(name)][fate] += 1
        return {part: fates for part, fates in counts.items() if any(fates.values())}

    def require(self, share_of_file: float = 0.0, share_of_model: float = 0.0, every_part: bool = False) -> None:
        """Raises BevctlError unless these shares were loaded at least, and something of `every_part` of the model.

        A head is a few per cent of the entries: shares alone would let another task's weights pass.
        """
        for found, wanted, whose in (
            (self.share_of_file, share_of_file, "the file's entries fit this model"),
            (self.share_of_model, share_of_model, "this model's entries are in the file"),
        ):
            if found < wanted:
                raise BevctlError(
                    f"Only {_percent(found)} of {whose}, {_percent(wanted)} are asked for: {self.source}.",
                    f"{'. '.join(self.sentences()[1:4])}. Choose the matching CONFIG, "
                    f"or take what fits with --min-loaded {_rounded_down(found)}.",
                )
        empty = [part for part, fates in self.by_part().items() if not fates["loaded"] and _wanted(fates)]
        if every_part and empty:
            raise BevctlError(
                f"{self.source} has nothing of {', '.join(empty)}, which this model has.",
                f"Choose the matching CONFIG. To start a new run from its weights: --load-from {self.source}; "
                f"to go on with random values there: --min-loaded {_rounded_down(self.share_of_model)}.",
            )


def _wanted(fates: dict[str, int]) -> int:
    """Entries of a part of the model."""
    return fates["loaded"] + fates["missing"] + fates["mismatched"]


def by_prefix(names: Iterable[str]) -> str:
    """Names in a few words: the first levels of their modules with the number of names, most frequent first."""
    levels = (name.split(".") for name in names)
    counts = Counter(".".join(parts[:-1][:3] or parts) for parts in levels)
    said = ", ".join(f"{prefix} ({count})" for prefix, count in counts.most_common(_MOST_PREFIXES))
    return said + (f" and {len(counts) - _MOST_PREFIXES} more" if len(counts) > _MOST_PREFIXES else "")


def part_of(name: str) -> str:
    return next((part for part in PARTS if name.startswith(f"{part}.")), "other")


def _percent(share: float) -> str:
    """As a percentage that never rounds up to all."""
    return f"{int(share * 1000) / 10:g} %"


def _rounded_down(share: float) -> str:
    return f"{int(share * 100) / 100:g}"
