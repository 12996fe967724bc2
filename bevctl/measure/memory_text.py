"""`bevctl memory` as tables for a terminal."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Iterator

from bevctl.console import RenderableType, table
from bevctl.measure.memory_plans import MARGIN, Plan, fits_on
from bevctl.measure.memory_report import Comparison, MemoryReport
from bevctl.sizes import format_gib

_NONE = "-"


def tables(report: MemoryReport) -> Iterator[RenderableType]:
    """Parameters, the peak by part and by size of the samples, plans."""
    rows = [*report.counts.by_part.items(), ("total", report.counts.trainable)]
    yield table(["part", "trainable parameters"], rows, title=report.config.name)
    if report.comparison is not None:
        yield from _compared(report.comparison)
    else:
        parts = [(name, format_gib(size)) for name, size in report.need.components.items()]
        title = f"Memory at the peak, {report.precision.upper()}, batch {report.config.train.batch}, predicted"
        yield table(["what", "memory"], parts, title=title)
    yield table(["samples", "allocated (tensors, graphs)", "reserved (torch)", "device (nvidia-smi)"], _sizes(report))
    yield from _plans(report)


def _sizes(report: MemoryReport) -> list[tuple[str, ...]]:
    """The peak by quantile of the samples; one row for quantiles next to each other that look the same."""
    shown = [(name, *map(format_gib, (n.allocated, n.reserved, n.device))) for name, n in report.by_size.items()]
    groups = [list(group) for _, group in itertools.groupby(shown, key=lambda row: row[1:])]
    return [(g[0][0] if len(g) == 1 else f"{g[0][0]} to {g[-1][0]}", *g[0][1:]) for g in groups]


def _compared(compared: Comparison) -> Iterator[RenderableType]:
    found, told = compared.measured.components, compared.predicted.components
    parts = [
        (name, *(format_gib(c[name]) if name in c else _NONE for c in (told, found))) for name in {**told, **found}
    ]
    yield table(["what", "predicted", "measured"], parts, title="Memory at the peak")
    rows = [
        (name, format_gib(getattr(compared.predicted, name)), format_gib(getattr(compared.measured, name)), f"{e:+.1%}")
        for name, e in compared.errors.items()
    ]
    start = format_gib(compared.measured.start_reserved)
    yield table(
        ["whole", "predicted", "measured", "error"], [*rows, ("reserved by the first steps", _NONE, start, _NONE)]
    )


def _plans(report: MemoryReport) -> Iterator[RenderableType]:
    """Settings and memory; times and cost where a time is known; risks."""
    plans = report.plans
    columns = ["plan", "batch", "acc.", "workers", "lr", "warm-up"]
    settings = [(_name(p), p.batch, p.accumulate, p.workers, f"{p.lr:g}", p.warmup) for p in plans]
    yield table(columns, settings, title="Plans", named=True)
    chance = ["runs out in an epoch"] if report.card is not None else []
    columns = ["plan", "allocated", "nvidia-smi", "large samples", *chance]
    yield table(columns, [_memory_row(plan) for plan in plans], title="Plans: memory", named=True)
    if plans[0].step is not None:
        on = f"{report.job.gpus} GPU{'s' if report.job.gpus > 1 else ''}, {report.job.samples:,} samples an epoch"
        title = f"Plans: {report.config.train.epochs} epochs on {on}, if started now"
        cost = ["cost"] if report.job.price is not None else []
        columns = ["plan", "s/iter", "epoch", "total", "finish", "GPU hours", *cost]
        yield table(columns, [_times(plan) for plan in plans], title=title, named=True)
    yield table(["plan", "mind"], [(_name(plan), plan.risk or _NONE) for plan in plans], named=True)


def _name(plan: Plan) -> str:
    return f"{plan.name} ({plan.letter})" if plan.letter is not None else plan.name


def _memory_row(plan: Plan) -> list[object]:
    chance = [f"{plan.chance:.2%}"] if plan.chance is not None else []
    return [_name(plan), *map(format_gib, (plan.typical.allocated, plan.typical.device, plan.large)), *chance]


def _times(plan: Plan) -> list[object]:
    assert plan.step is not None
    assert plan.step_s is not None
    assert plan.epoch_s is not None
    assert plan.total_s is not None
    finish = datetime.datetime.now() + datetime.timedelta(seconds=plan.total_s)
    about = "" if plan.step.measured else "~"
    cost = [f"{plan.cost:.0f}"] if plan.cost is not None else []
    spans = [span(plan.epoch_s), span(plan.total_s), f"{finish:%Y-%m-%d %H:%M}", f"{plan.gpu_hours:.0f}"]
    return [_name(plan), f"{about}{plan.step_s:.3g}", *spans, *cost]


def span(seconds: float) -> str:
    """Hours and minutes."""
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02} min"


def verdict(report: MemoryReport, plan: Plan) -> str:
    """What the chosen plan takes, in one sentence, and whether it fits the card if one is given."""
    name = f"{plan.name} (plan {plan.letter})" if plan.letter is not None else plan.name
    takes = f"{format_gib(plan.large)} on the device with large samples, lr {plan.lr:g}"
    if report.card is None:
        return f"{name}: {takes}"
    if plan is report.chosen:
        return f"For {format_gib(report.card)}: {name}, the fastest with {MARGIN:.0%} to spare: {takes}"
    fits = "fits" if fits_on(plan, report.card) else "does not fit"
    return f"For {format_gib(report.card)}: {name} {fits} with {MARGIN:.0%} to spare: {takes}"
