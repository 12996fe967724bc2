"""What a profiled step says of half precision: what keeps it from being faster, the costliest first."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bevctl.diagnose.report import DiagnoseFinding, Remedy
from bevctl.finding import Evidence, Severity
from bevctl.measure.step_profile import StepProfile
from bevctl.numerics.census import ODD, OFF, OUT_OF_REACH, SMALL, Census, Group
from bevctl.numerics.place import Place

INACTIVE, DATA_WAIT, ISLAND, UNTOUCHED, HOST_WAITS, LAUNCHES, ODD_WIDTHS, CASTS, COMMUNICATION = (
    *(
        "SPEED110",
        "SPEED111",
        "SPEED112",
        "SPEED113",
        "SPEED114",
        "SPEED115",
        "SPEED116",
        "SPEED117",
        "SPEED118",
    ),
)
WORTH = 0.05
"""Share of an iteration from which on a cause is worth a warning."""
MUCH_DATA, UNTOUCHED_SHARE, IDLE_SHARE, FEW_WAITS = 0.2, 0.15, 0.1, 8
_SINGLE_FLOPS, _SINGLE_BYTES, _ODD_FLOPS, _CAST_BYTES, _TALK = 0.02, 0.1, 0.1, 0.15, 0.15
SMALL_BATCH = 2
"""Samples from which on a larger batch is the first thing to try against launches."""
_BACKWARD = 3.5
"""A part's forward and backward pass over its forward pass, at most."""
_SHOWN = 4


@dataclass(frozen=True)
class Cause:
    """Something that keeps half precision from being faster."""

    id: str
    lost: float
    """Share of an iteration, 0..1, that it costs, as a rough estimate."""
    title: str
    evidence: tuple[Evidence, ...]
    cause: str
    fix: tuple[Remedy, ...] = ()
    part: str = ""
    """The module that it is in; "" for the whole step."""

    def finding(self) -> DiagnoseFinding:
        severity = Severity.WARN if self.lost >= WORTH else Severity.INFO
        return DiagnoseFinding(
            self.id, severity, min(0.95, 0.5 + self.lost / 2), self.title, self.evidence, self.cause, self.fix
        )


def causes(half: StepProfile, single: StepProfile | None) -> list[Cause]:
    """Every cause that the step in half precision shows, the costliest first.

    Args:
        single: the same step in FP32.
    """
    rules = (_inactive, _data_wait, _islands, _host_waits, _launches, _odd_widths, _casts, _communication)
    found = [cause for rule in rules for cause in rule(half)]
    named = [cause.part for cause in found if cause.id in (ISLAND, HOST_WAITS)]
    found += [c for c in _untouched(half, single) if not any(f"{part}.".startswith(f"{c.part}.") for part in named)]
    return sorted(found, key=lambda cause: -cause.lost)


def _inactive(half: StepProfile) -> Iterator[Cause]:
    flops, in_half = half.census.total("flops"), half.census.total("half_flops")
    if half.precision == "fp32" or (flops and in_half < 0.02 * flops):
        told = f"precision is {half.precision}; {in_half / max(flops, 1):.0%} of the arithmetic ran in half precision"
        yield Cause(
            INACTIVE,
            1.0,
            "Half precision is not on",
            (Evidence("profile", told),),
            "Matrix products and convolutions run in FP32, whatever the setting is called.",
            (Remedy({"precision.dtype": "fp16"}, "half precision"),),
        )


def _data_wait(half: StepProfile) -> Iterator[Cause]:
    if half.data_wait is None or half.data_wait < MUCH_DATA * half.iteration:
        return
    share = half.data_wait / half.iteration
    told = f"{1e3 * half.data_wait:.1f} ms for a batch, {1e3 * half.seconds:.1f} ms for the step"
    yield Cause(
        DATA_WAIT,
        share,
        f"{share:.0%} of an iteration waits for data",
        (Evidence("loader", told),),
        "Batches come more slowly than they are used; faster computing only waits longer.",
        (Remedy({}, "more loading processes (--workers auto), cached or smaller data"),),
    )


def _islands(half: StepProfile) -> Iterator[Cause]:
    """Modules that compute in FP32 inside a step in half precision."""
    if half.precision == "fp32":
        return
    census = half.census
    flops, written = max(census.total("flops"), 1), max(census.total("float_bytes"), 1)
    in_half = census.total("half_flops")
    for module, groups in _by_module(census).items():
        single = sum(group.why[OFF] + group.why[OUT_OF_REACH] for _, group in groups)
        bytes_single = sum(group.single_bytes for _, group in groups)
        raised = sum(group.raised_bytes for _, group in groups)
        by_bytes = bytes_single >= _SINGLE_BYTES * written and raised > 0
        if in_half < 0.02 * flops or (single < _SINGLE_FLOPS * flops and not by_bytes):
            continue
        time = _share_of(half, module)
        lost = (
            time * max(single / max(_flops_of(census, module), 1), bytes_single / max(_bytes_of(census, module), 1)) / 2
        )
        off = any(group.why[OFF] for _, group in groups) or (by_bytes and not single)
        why = "autocast is off there, or its input is made FP32" if off else "its operation is not one of autocast's"
        yield Cause(
            ISLAND,
            max(lost, WORTH if single >= _ODD_FLOPS * flops or by_bytes else 0.0),
            f"{module or 'the model itself'}: computes in FP32",
            tuple(_lines(groups, flops, written)),
            f"{single / flops:.0%} of the arithmetic and {bytes_single / written:.0%} of the bytes stay FP32: {why}.",
            (
                Remedy(
                    {}, f"half precision for {module or 'it'}: no .float(), an operator that takes half, in autocast"
                ),
            ),
            module,
        )


def _lines(groups: Sequence[tuple[Place, Group]], flops: int, written: int) -> Iterator[Evidence]:
    """The places with the most work in FP32."""

    def weight(item: tuple[Place, Group]) -> float:
        return (item[1].why[OFF] + item[1].why[OUT_OF_REACH]) / flops + item[1].single_bytes / written

    for place, group in sorted(groups, key=weight, reverse=True)[:_SHOWN]:
        if weight((place, group)) > 0:
            share = (group.why[OFF] + group.why[OUT_OF_REACH]) / flops
            yield Evidence(str(place), f"{share:.0%} of the arithmetic, {group.single_bytes / 2**20:.1f} MiB in FP32")


def _host_waits(half: StepProfile) -> Iterator[Cause]:
    """Code that makes the host and the device wait for each other."""
    count = sum(number for _, number in half.waits)
    idle = half.idle / half.iteration
    by_part = Counter(half.kernels.idle_by_part) if half.kernels is not None else Counter(_waiting_parts(half))
    enough = count >= FEW_WAITS or idle >= IDLE_SHARE if half.kernels is not None else count >= FEW_WAITS
    if not by_part or count == 0 or not enough or (half.kernels is None and idle < IDLE_SHARE):
        return
    part, seconds = by_part.most_common(1)[0]
    lost = seconds / half.iteration if half.kernels is not None else _share_of(half, part)
    if lost < WORTH:
        return
    told = f"{count} waits a step; nothing runs on the device for {idle:.0%} of the iteration"
    yield Cause(
        HOST_WAITS,
        lost,
        f"{part or 'the model itself'}: the host waits for the device, and it for the host",
        (Evidence("profile", told), *(Evidence(site, f"{number} × a step") for site, number in half.waits[:_SHOWN])),
        "Each .item(), .cpu(), nonzero() or print of a tensor empties the queue of kernels; then the device waits.",
        (Remedy({}, "keep such numbers on the device, or read them once a step"),),
        part,
    )


def _waiting_parts(half: StepProfile) -> dict[str, float]:
    """Where there is no device: parts by how often the host waits in them."""
    found: dict[str, float] = defaultdict(float)
    for place, group in half.census.groups.items():
        if group.waits:
            found[place.module] += group.waits
    return dict(found)


def _launches(half: StepProfile) -> Iterator[Cause]:
    """More kernels than the host can ask for."""
    kernels = half.kernels
    if kernels is None or half.idle < 0.25 * half.iteration or kernels.launches < 500:
        return
    waiting = sum(number for _, number in half.waits)
    lost = half.idle / half.iteration * (0.5 if waiting >= FEW_WAITS else 1.0)
    mean = 1e6 * kernels.busy / kernels.launches
    small = half.batch <= SMALL_BATCH
    title = f"A batch of {half.batch} is too small" if small else "The host is the limit"
    fixes = [Remedy({"train.cuda_graphs": True}, "parts recorded as CUDA graphs, or --compile")]
    if small:
        fixes.insert(0, Remedy({}, f"a batch of {4 * half.batch} with the memory that half precision frees"))
    yield Cause(
        LAUNCHES,
        lost,
        f"{title}: {kernels.launches:.0f} launches of {mean:.0f} µs a step, and the device rests {lost:.0%} of it",
        (Evidence("profile", f"kernels take {1e3 * kernels.busy:.1f} of {1e3 * half.seconds:.1f} ms"),),
        "Kernels end before the host has asked for the next; faster arithmetic does not shorten that.",
        tuple(fixes),
    )


def _odd_widths(half: StepProfile) -> Iterator[Cause]:
    flops = max(half.census.total("flops"), 1)
    groups = [(place, group) for place, group in half.census.places() if group.why[ODD]]
    share = sum(group.why[ODD] for _, group in groups) / flops
    if share < _ODD_FLOPS:
        return
    small = sum(group.why[SMALL] for group in half.census.groups.values()) / flops
    yield Cause(
        ODD_WIDTHS,
        0.5 * share * half.products / half.iteration,
        f"{share:.0%} of the arithmetic has widths that are no multiple of 8",
        tuple(Evidence(str(p), f"{p.module}: {g.why[ODD] / flops:.0%} of the arithmetic") for p, g in groups[:_SHOWN]),
        f"Tensor cores take FP16 in eights: it runs padded, or without them. {small:.0%} more is too small for them.",
        (Remedy({}, "widths that are multiples of 8 (better 64); such weights must be trained anew"),),
    )


def _casts(half: StepProfile) -> Iterator[Cause]:
    cast, written = half.census.total("cast_bytes"), half.census.total("float_bytes")
    share = cast / max(cast + written, 1)
    if half.precision == "fp32" or share < _CAST_BYTES:
        return
    groups = sorted(half.census.groups.items(), key=lambda item: -item[1].cast_bytes)[:_SHOWN]
    rest = max(half.iteration - half.products - half.idle - half.optimizer, 0.0) / half.iteration
    yield Cause(
        CASTS,
        share * rest / 2,
        f"{share:.0%} of the bytes written are conversions between FP16 and FP32",
        tuple(Evidence(str(place), f"{place.module}: {group.cast_bytes / 2**20:.1f} MiB") for place, group in groups),
        "Where formats alternate, each change is a pass over memory.",
        (Remedy({}, "longer stretches in one format"),),
    )


def _communication(half: StepProfile) -> Iterator[Cause]:
    if half.kernels is None or half.kernels.communication < _TALK * half.iteration:
        return
    share = half.kernels.communication / half.iteration
    yield Cause(
        COMMUNICATION,
        share,
        f"{share:.0%} of an iteration exchanges gradients",
        (Evidence("profile", f"{1e3 * half.kernels.communication:.1f} ms in NCCL"),),
        "GPUs wait for each other; half precision of the computing does not shorten that.",
        (Remedy({"train.gradient_compression": "fp16"}, "half as many bytes; or --accumulate"),),
    )


def _untouched(half: StepProfile, single: StepProfile | None) -> Iterator[Cause]:
    """Parts without arithmetic that half precision could speed up."""
    flops = max(half.census.total("flops"), 1)
    for part, seconds in half.parts().most_common():
        forward = half.split.get(f"forward/{part}", 0.0)
        # The backward pass of the part before can look like its own.
        share = min(seconds, _BACKWARD * forward) / half.iteration
        of_part = _flops_of(half.census, part) / flops
        gain = single.of_part(part) / seconds if single is not None and seconds > 0 else 1.0
        # A part in which nothing runs waits for the host, which others tell of.
        rests = half.kernels is not None and half.kernels.idle_by_part.get(part, 0.0) > 0.5 * seconds
        if rests or share < UNTOUCHED_SHARE or of_part > 0.01 or gain > 1.1 or part in ("rest", ""):
            continue
        longest = half.kernels.longest[:_SHOWN] if half.kernels is not None else []
        lines = sorted(_groups_of(half.census, part), key=lambda item: -item[1].calls)[:_SHOWN]
        yield Cause(
            UNTOUCHED,
            share,
            f"{part}: {share:.0%} of the iteration, and half precision does not touch it",
            (
                Evidence("profile", f"{1e3 * seconds:.1f} ms with {of_part:.1%} of the arithmetic"),
                *(Evidence(str(place), f"{group.calls} operations") for place, group in lines),
                *(Evidence("kernel", f"{name[:60]}: {1e3 * s:.2f} ms, {n:.0f} ×") for name, s, n in longest),
            ),
            "Serial code, index arithmetic or copies are as slow in half precision as in FP32.",
            (Remedy({}, "a parallel or vectorised form of it, or once a data set instead of once a step"),),
            part,
        )


def _by_module(census: Census) -> dict[str, list[tuple[Place, Group]]]:
    found: dict[str, list[tuple[Place, Group]]] = defaultdict(list)
    for place, group in census.groups.items():
        found[place.module].append((place, group))
    return found


def _groups_of(census: Census, part: str) -> list[tuple[Place, Group]]:
    return [(p, g) for p, g in census.groups.items() if p.module == part or p.module.startswith(f"{part}.")]


def _flops_of(census: Census, part: str) -> int:
    return sum(group.flops for _, group in _groups_of(census, part))


def _bytes_of(census: Census, part: str) -> int:
    return sum(group.float_bytes for _, group in _groups_of(census, part))


def _share_of(profile: StepProfile, module: str) -> float:
    """Of an iteration, the time of the part that a module lies in."""
    parts = profile.parts()
    inside = [part for part in parts if module == part or module.startswith(f"{part}.")]
    name = max(inside, key=len, default="rest")
    return parts[name] / profile.iteration
