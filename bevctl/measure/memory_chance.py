"""How likely a run meets a batch of large samples that does not fit."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def chance_of_running_out(largest: Sequence[float], room: float, batch: int, steps: int) -> float:
    """Probability, 0..1, that at least one of `steps` batches needs more than there is room for.

    Args:
        largest: what each of some samples takes of the room, bytes.
        room: bytes for the samples of a batch together.

    Sums of random samples are taken as normal (central limit theorem); a batch can at most be `batch` times the
    largest sample that was seen.
    """
    if batch * max(largest) <= room:
        return 0.0
    mean, spread = statistics.fmean(largest), statistics.pstdev(largest)
    if spread == 0:
        return float(batch * mean > room)
    beyond = 0.5 * math.erfc((room - batch * mean) / (math.sqrt(2 * batch) * spread))
    return -math.expm1(steps * math.log1p(-min(beyond, 1 - 1e-15)))
