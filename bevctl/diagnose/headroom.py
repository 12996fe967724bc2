"""Which parts of the model come closest to the limit of FP16, so that the next to break is known too."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bevctl.diagnose.report import Table
from bevctl.numerics.formats import FP16_MAX
from bevctl.numerics.record import OpRecord

_ROWS = 6


def headroom(records: Sequence[OpRecord]) -> Table:
    """The modules with the largest finite FP16 results of a traced step, forward and backward apart."""
    largest: dict[tuple[str, str], tuple[float, OpRecord]] = {}
    for record in (record for record in records if record.status == "fine"):
        phase = "backward" if record.phase == "backward" else "forward"
        reach = max((extent.largest for extent in record.outputs if extent.dtype is torch.float16), default=0.0)
        key = (record.module, phase)
        if reach > largest.get(key, (0.0, record))[0]:
            largest[key] = (reach, record)
    ranked = sorted(largest.items(), key=lambda item: -item[1][0])[:_ROWS]
    rows = [
        (module or "the model itself", phase, record.op, reach, f"{reach / FP16_MAX:.1%}")
        for (module, phase), (reach, record) in ranked
    ]
    columns = ("module", "phase", "operation", "largest", "of_limit")
    return Table("headroom", "Next to break: the largest FP16 results beside those; the limit is 65504", columns, rows)
