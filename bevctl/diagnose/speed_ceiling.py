"""How much half precision can give a profiled step at most, how much of it is there, and where the step's time goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bevctl.diagnose.report import DiagnoseFinding, Table
from bevctl.diagnose.speed_causes import WORTH, Cause
from bevctl.finding import Evidence, Severity
from bevctl.measure.step_profile import StepProfile
from bevctl.numerics.census import ODD, OFF, OUT_OF_REACH, SMALL

CEILING = "SPEED119"
HEALTHY = 0.7
"""Part of the ceiling that a run without fault reaches at least."""


@dataclass(frozen=True)
class Ceiling:
    """How fast half precision can be here, against FP32, and how fast it is."""

    most: float
    """At least what was reached."""
    reached: float
    because: str

    @property
    def share(self) -> float:
        """Of what half precision can give: 1 where the whole possible gain is there."""
        return self.reached / self.most

    def sentence(self) -> str:
        return f"Half precision can give at most {self.most:.2f} × here, because {self.because}"


def ceiling(half: StepProfile, single: StepProfile, rate: float, tf32_rate: float = 1.0) -> Ceiling:
    """What half precision can give at most.

    Products become as much faster as half precision multiplies faster than what they ran in, and everything else in
    the model moves half the bytes; the wait for data, the time without any operation and the optimizer stay as they
    are.

    Args:
        rate: arithmetic a second in half precision over that in FP32, measured.
        tf32_rate: the same over that in TF32, in which PyTorch convolves FP32 where it can.
    """
    waiting = single.data_wait or 0.0
    fixed = waiting + single.idle + single.optimizer
    in_tf32 = single.kernels.tf32_products if single.kernels is not None else 0.0
    in_fp32 = max(single.products - in_tf32, 0.0)
    rest = max(single.iteration - fixed - in_fp32 - in_tf32, 0.0)
    most = single.iteration / (fixed + in_fp32 / max(rate, 1.0) + in_tf32 / max(tf32_rate, 1.0) + rest / 2)
    shares = {
        "waits for data": waiting,
        "is time without any operation": single.idle,
        "is the optimizer": single.optimizer,
        "is not matrix arithmetic, and gains twice at most": rest,
        f"is matrix arithmetic in TF32, {tf32_rate:.1f} × as fast in half precision": in_tf32,
        f"is matrix arithmetic in FP32, {rate:.1f} × as fast in half precision": in_fp32,
    }
    told = [f"{seconds / single.iteration:.0%} of the FP32 iteration {name}" for name, seconds in shares.items()]
    kept = [
        sentence for sentence, seconds in zip(told, shares.values(), strict=True) if seconds > 0.03 * single.iteration
    ]
    reached = single.iteration / half.iteration
    return Ceiling(max(most, reached), reached, ", ".join(kept))


def verdict(found: Sequence[Cause], limit: Ceiling) -> DiagnoseFinding:
    """The ceiling; a run without fault says so first."""
    at = f"at {limit.share:.0%} of what half precision can give"
    fault = any(cause.lost >= WORTH for cause in found) and limit.share < 1.0
    title = f"Half precision gives {limit.reached:.2f} ×, {at}" if fault else f"no fault: {at} ({limit.reached:.2f} ×)"
    return DiagnoseFinding(CEILING, Severity.INFO, 0.8, title, (Evidence("ceiling", limit.sentence()),), "")


def tables(half: StepProfile) -> list[Table]:
    """Where the step's time goes, and in which format its arithmetic ran."""
    names = {"waiting for data": half.data_wait or 0.0, **half.split}
    rows = [(name, 1e3 * s, s / half.iteration) for name, s in names.items() if s > 0]
    if half.kernels is not None:
        kernels = half.kernels
        more = {
            "of it: no kernel runs": half.idle,
            "of it: copies to the device": kernels.to_device,
            "of it: channels turned for convolutions": kernels.layout,
            "of it: exchange between GPUs": kernels.communication,
            "of it: the host waits": kernels.waits,
        }
        rows += [(name, 1e3 * s, s / half.iteration) for name, s in more.items()]
    flops = max(half.census.total("flops"), 1)
    whys = {why: sum(g.why[why] for g in half.census.groups.values()) for why in (OFF, OUT_OF_REACH, ODD, SMALL)}
    planar = half.census.total("planar_flops")
    formats = [("in half precision", half.census.total("half_flops") / flops)]
    formats += [(f"eligible, {why}", count / flops) for why, count in whys.items()]
    formats += [("convolutions whose channels are not last", planar / flops)]
    libraries = 0.0 if half.kernels is None else half.kernels.products - half.kernels.own_products
    if half.kernels is not None and libraries > 0:
        formats.append(("time of cuBLAS and cuDNN in half precision", half.kernels.half_products / libraries))
    return [
        Table("split", f"A step in {half.precision.upper()}, batch {half.batch}", ("what", "ms", "share"), rows),
        Table("formats", "Arithmetic (products, convolutions, attention)", ("what", "share"), formats),
    ]
