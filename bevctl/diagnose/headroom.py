"""Which parts of the model come closest to the limits of FP16, so that the next to break is known too."""

from __future__ import annotations

from collections.abc import Sequence

from bevctl.diagnose.report import Table
from bevctl.numerics.formats import FP16_MAX
from bevctl.numerics.ranges import ModuleRange

_ROWS = 6
_COLUMNS = ("module", "phase", "operation", "largest", "of_limit", "saturated", "underflow")


def headroom(ranges: Sequence[ModuleRange], title: str, dtype: str = "float16") -> Table:
    """The modules with the largest finite results in a format, float16 or bfloat16, of traced steps.

    `of_limit` is the largest over 65504, `saturated` the share of a result above 0.9 times that, `underflow` the share
    of the module's non-zero results so small that FP16 loses bits of them.
    """
    halves = [entry for entry in ranges if entry.dtype == dtype]
    closest = sorted(halves, key=lambda entry: -entry.largest)[:_ROWS]
    rows = [
        (
            entry.module or "the model itself",
            entry.phase,
            entry.largest_op,
            entry.largest,
            entry.largest / FP16_MAX,
            entry.saturated,
            entry.subnormal(),
        )
        for entry in closest
    ]
    return Table("headroom", title, _COLUMNS, rows)
