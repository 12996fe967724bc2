"""`bevctl bench` as tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bevctl.console import RenderableType, table
from bevctl.measure.bench_compare import Comparison
from bevctl.measure.bench_report import Report, Result
from bevctl.sizes import format_gib

_NONE = "-"


def tables(report: Report) -> list[RenderableType]:
    """The whole step, its parts, what they cost the host of a GPU, and the ratios."""
    measured = [result for result in report.results if result.step_s is not None]
    hosts = [_host(measured)] if any(result.host_by_part for result in measured) else []
    return [_steps(report.results), _parts(measured), *hosts, *([_ratios(report)] if report.ratios() else [])]


def _steps(results: Sequence[Result]) -> RenderableType:
    columns = ["precision", "batch", "ms/step", "p10-p90", "samples/s", "allocated", "reserved", "host ms", "kernel ms"]
    columns += ["MFU", "loss"]
    return table(columns, [_step_row(result) for result in results], title="A training step")


def _step_row(result: Result) -> list[object]:
    if result.step_s is None:
        return [result.precision, result.batch, result.error or _NONE, *[_NONE] * 8]
    spread = result.step_s
    return [
        result.precision,
        result.batch,
        _ms(spread.median),
        f"{_ms(spread.p10)}-{_ms(spread.p90)}",
        f"{result.batch / spread.median:.2f}",
        _gib(result.allocated_bytes),
        _gib(result.reserved_bytes),
        _NONE if result.host_s is None else _ms(result.host_s),
        _NONE if result.kernel_s is None else _ms(result.kernel_s),
        _NONE if result.mfu is None else f"{result.mfu:.1%}",
        _NONE if result.loss is None else f"{result.loss:.5g}",
    ]


def _parts(results: Sequence[Result]) -> RenderableType:
    """Forward / backward of each part, one column a precision."""
    splits = [result.split for result in results if result.split is not None]
    names = list(dict.fromkeys(n for s in splits for n in (*s.forward_by_part, *s.backward_by_part)))
    rows: list[list[object]] = [["data", *(_ms(split.data) for split in splits)]]
    for name in names:
        pairs = ((s.forward_by_part.get(name), s.backward_by_part.get(name)) for s in splits)
        rows.append([name, *(" / ".join(_NONE if t is None else _ms(t) for t in pair) for pair in pairs)])
    rows.append(["all parts", *(f"{_ms(split.forward)} / {_ms(split.backward)}" for split in splits)])
    rows.append(["optimizer", *(_ms(split.optimizer) for split in splits)])
    return table(["part", *(result.precision for result in results)], rows, title="Forward / backward, ms")


def _host(results: Sequence[Result]) -> RenderableType:
    """What the host needs to launch the forward / backward of each part, one column a precision."""
    hosts = [result.host_by_part for result in results if result.host_by_part is not None]
    parts = dict.fromkeys(name.partition("/")[2] or name for host in hosts for name in host)
    rows = [[part, *(_launching(part, host) for host in hosts)] for part in parts]
    return table(["part", *(result.precision for result in results)], rows, title="Launching from the host, ms")


def _launching(part: str, host: Mapping[str, float]) -> str:
    if part in host:
        return _ms(host[part])
    pair = (host.get(f"{phase}/{part}") for phase in ("forward", "backward"))
    return " / ".join(_NONE if seconds is None else _ms(seconds) for seconds in pair)


def _ratios(report: Report) -> RenderableType:
    rows = [
        [
            name,
            f"{ratio['speed']:.2f} x",
            _NONE if ratio["memory"] is None else f"{ratio['memory']:.0%}",
            _NONE if ratio["loss_difference"] is None else f"{ratio['loss_difference']:+.2g}",
        ]
        for name, ratio in report.ratios().items()
    ]
    return table(["against", "speed", "memory", "loss"], rows, title="Ratios")


def comparison_table(comparison: Comparison, limit: float) -> RenderableType:
    """Every quantity of both documents, with those over `limit` marked."""
    rows = []
    for change in comparison.changes:
        shown = [
            _ms(v) + " ms" if change.quantity == "step_s" else format_gib(v) for v in (change.before, change.after)
        ]
        verdict = "over the limit" if change.change > limit else "ok"
        rows.append([change.precision, change.batch, change.quantity, *shown, f"{change.change:+.1%}", verdict])
    return table(["precision", "batch", "quantity", "before", "after", "change", ""], rows)


def _ms(seconds: float) -> str:
    milliseconds = seconds * 1e3
    return f"{milliseconds:.2f}" if milliseconds < 100 else f"{milliseconds:.0f}"


def _gib(size: int | None) -> str:
    return _NONE if size is None else format_gib(size)
