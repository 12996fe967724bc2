"""What a non-finite number in an operation's result means."""

from __future__ import annotations

from collections.abc import Sequence

from bevctl.numerics.extent import Extent
from bevctl.numerics.ledger import Known
from bevctl.numerics.operation import Call
from bevctl.numerics.record import Status

CONSTANT = "a constant of the code is not finite"


def classify(call: Call, known: Sequence[Known], outputs: Sequence[Extent], on_purpose: bool) -> tuple[Status, str]:
    """Status of an operation's record, and why: see `OpRecord.status`.

    Args:
        call: the operation.
        known: its floating-point inputs.
        outputs: what it made.
        on_purpose: it reads a test of what is finite.
    """
    traits = call.traits
    if traits.uninitialised is not None:
        return "declared", traits.uninitialised.reason
    bad_inputs = [k for k in known if k.extent.bad]
    culpable = any(not k.declared for k in bad_inputs)
    if not any(extent.bad for extent in outputs):
        if not culpable or traits.masking is None:
            return "fine", ""
        return "masks" if traits.masking.blanket or on_purpose else "drops", traits.masking.reason
    if culpable:
        return "inherits", ""
    excuse = _excuse(call, bad_inputs, outputs)
    return ("declared", excuse) if excuse else ("origin", "")


def _excuse(call: Call, bad_inputs: Sequence[Known], outputs: Sequence[Extent]) -> str:
    """Why a result without a guilty input may be not finite; "" where nothing excuses it.

    NaN made of infinities that were meant, as a softmax of a row of −inf, is no longer what was meant.
    """
    for rule in call.traits.unfinished:
        if all(not extent.bad or i in rule.outputs for i, extent in enumerate(outputs)):
            return rule.reason
    if any(extent.nan for extent in outputs) and not any(k.extent.nan for k in bad_inputs):
        return CONSTANT if _has_nan_constant(call) else ""
    if bad_inputs:
        return bad_inputs[0].declared
    return CONSTANT if call.asks_for_nonfinite else ""


def _has_nan_constant(call: Call) -> bool:
    return any(number != number for number in call.constants())
