"""What a benchmark of a step in FP32 and in half precision says of what is to gain."""

from __future__ import annotations

from collections.abc import Iterator

from bevctl.diagnose.bench_limits import GAINS, Pair
from bevctl.diagnose.report import DiagnoseFinding, Remedy, Table
from bevctl.finding import Evidence, Severity
from bevctl.monitor.alarms.precision import SAME

AMDAHL, LAUNCHES = "SPEED107", "SPEED108"
_MOST = 6


def by_parts(pair: Pair) -> Iterator[DiagnoseFinding]:
    """What a benchmark of both formats says: the parts that do not gain, and the host's launches."""
    half, base = pair.half, pair.base
    where = f"bench, batch {half.batch}"
    steps = (
        f"{1e3 * base.step:.1f} ms in {base.precision.upper()}, {1e3 * half.step:.1f} ms in {half.precision.upper()}"
    )
    faster = pair.speed >= 1 / SAME
    if pair.host_bound and half.host is not None and half.kernel is not None:
        launches = f" for {half.launches:.0f} launches" if half.launches is not None else ""
        yield DiagnoseFinding(
            LAUNCHES,
            Severity.WARN,
            0.9,
            f"The host is the limit: {1e3 * half.host:.1f} ms{launches}, the GPU needs {1e3 * half.kernel:.1f} ms",
            (
                Evidence(where, steps),
                Evidence("ceiling", f"{base.step / half.kernel:.2f} times, if launches cost nothing"),
            ),
            "The GPU waits for the next kernel; faster arithmetic does not shorten that.",
            (Remedy({"train.cuda_graphs": True}, "recorded parts, a larger batch, or --compile"),),
        )
    stuck = [row for row in pair.gains() if row[3] < GAINS]
    ceiling = f"at most {pair.ceiling:.2f} times" if pair.ceiling is not None else "no part holds it back"
    share = sum(row[1] for row in stuck) / max(sum(row[1] for row in pair.gains()), 1e-12)
    yield DiagnoseFinding(
        AMDAHL,
        Severity.INFO if faster else Severity.WARN,
        0.85,
        f"Half precision gives {pair.speed:.2f} times; the parts allow {ceiling}"
        if pair.ceiling is not None
        else f"Half precision gives {pair.speed:.2f} times, and {ceiling}",
        (
            Evidence(where, steps),
            *(Evidence(n, f"{1e3 * a:.2f} ms, {1e3 * b:.2f} ms in half precision") for n, a, b, _ in stuck[:_MOST]),
        ),
        f"{share:.0%} of the {base.precision.upper()} step is in parts that gain less than a tenth."
        if stuck
        else "Every part gains.",
    )


def part_table(pair: Pair | None) -> list[Table]:
    rows = [(name, 1e3 * base, 1e3 * half, gain) for name, base, half, gain in (pair.gains() if pair else ())]
    title = "Parts of the step, the longest first"
    return [Table("parts", title, ("part", "fp32_ms", "half_ms", "gain"), rows)] if rows else []
