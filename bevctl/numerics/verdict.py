"""Why an operation with finite inputs gave something that is not: the number format, or the numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bevctl.numerics.extent import Extent, measure
from bevctl.numerics.formats import FP16_MAX, short_name, wider
from bevctl.numerics.operation import Call
from bevctl.numerics.poles import pole_sentence
from bevctl.numerics.recent import RecentCalls, Rounding
from bevctl.numerics.record import Verdict
from bevctl.numerics.rerun import run_wide


def judge(call: Call, writers: Sequence[int], dtypes: set[torch.dtype], recent: RecentCalls) -> Verdict:
    """Runs the call again on the same inputs in a wider format: FP32 for half precision, FP64 for FP32.

    Where that is not finite either, the operations that made its inputs are done again too, as far as they are
    remembered: a number that half precision rounded to zero shows up.

    Args:
        call: the operation.
        writers: record or source that each of its floating-point inputs came from.
        dtypes: of its floating-point inputs and outputs.
        recent: the operations before it.
    """
    narrow = narrowest(dtypes)
    try:
        wide = measure(run_wide(call, narrow))
        if not any(extent.bad for extent in wide):
            return _overflow(narrow, max(wide, key=lambda extent: extent.largest))
        return _underflow(call, writers, recent) or _no_matter_of_range(call, narrow, wide)
    except RuntimeError as error:  # also where there is no kernel for it
        reason = str(error).strip().split("\n")[0]
        return Verdict("unknown", f"{call.traits.name} could not run in {short_name(wider(narrow))}: {reason}")


def narrowest(dtypes: set[torch.dtype]) -> torch.dtype:
    """The format with the smallest range."""
    order = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    return next((dtype for dtype in order if dtype in dtypes), torch.float32)


def _overflow(narrow: torch.dtype, wide: Extent) -> Verdict:
    limit = FP16_MAX if narrow is torch.float16 else torch.finfo(narrow).max
    result = f"the same inputs give finite numbers up to {wide.largest:.4g} in {short_name(wide.dtype)}"
    name = short_name(narrow)
    if wide.largest > limit:
        return Verdict("overflow", f"{result}, and {name} ends at {limit:.5g}", wide)
    return Verdict("overflow", f"{result}: {name} overflowed inside the operation", wide)


def _underflow(call: Call, writers: Sequence[int], recent: RecentCalls) -> Verdict | None:
    """The verdict if the call succeeds on inputs that were made in FP32 throughout."""
    replaced, roundings = recent.widened(call.read(), writers)
    if not replaced:
        return None
    wide = measure(run_wide(call, torch.float16, replaced))
    if any(extent.bad for extent in wide):
        return None
    return Verdict("underflow", _rounded(call, roundings), wide[0], tuple(rounding.index for rounding in roundings))


def _rounded(call: Call, roundings: Sequence[Rounding]) -> str:
    pole = pole_sentence(call)
    said = f"{pole}; " if pole else ""
    if not roundings:
        return (
            f"{said}its inputs give a finite number when they are computed in float32: half precision lost a difference"
        )
    return f"{said}{roundings[0].smallest:.3g} was rounded to zero in half precision before it"


def _no_matter_of_range(call: Call, narrow: torch.dtype, wide: Sequence[Extent]) -> Verdict:
    bad = next(extent for extent in wide if extent.bad)
    said = pole_sentence(call) or f"{call.traits.name} of these inputs"
    return Verdict("code", f"{said}: not finite in {short_name(wider(narrow))} either", bad)
