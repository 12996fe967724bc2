"""`bevctl bench` as a picture: a bar of each precision's step, made of its pieces, and one of its memory."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw

from bevctl.evaluate.canvas import FAINT, INK, SUPERSAMPLE, Color, finish, font, new_panel
from bevctl.files import atomic_write_bytes
from bevctl.measure.bench_report import Report, Result
from bevctl.sizes import format_gib

WIDTH, ROW, LEFT, RIGHT, TOP = 960, 46, 90, 150, 64
_PIECES: dict[str, Color] = {
    "data": (136, 150, 0),
    "forward": (33, 118, 214),
    "backward": (235, 108, 20),
    "optimizer": (132, 60, 178),
}
_MEMORY: Color = (0, 146, 136)


def draw(report: Report) -> Image.Image:
    """The picture, 960 pixels wide."""
    measured = [result for result in report.results if result.step_s is not None]
    with_memory = [result for result in measured if result.allocated_bytes is not None]
    rows = len(measured) + (len(with_memory) + 1 if with_memory else 0)
    panel = new_panel(WIDTH, TOP + ROW * rows + 16)
    drawing = _Drawing(panel)
    drawing.text(16, 12, f"A training step on {report.hardware['device']}, batch {measured[0].batch}", 18, INK)
    drawing.legend(_PIECES)
    top = _draw_times(drawing, measured, TOP)
    if with_memory:
        drawing.text(16, top + 14, "Peak memory allocated", 14, INK)
        _draw_memory(drawing, with_memory, top + ROW)
    return finish(panel)


def save(report: Report, path: Path) -> None:
    """Writes the picture as PNG; raises OSError where that fails."""
    content = io.BytesIO()
    draw(report).save(content, "PNG")
    atomic_write_bytes(path, content.getvalue())


class _Drawing:
    """Rectangles and text in the coordinates of the finished picture."""

    def __init__(self, panel: Image.Image) -> None:
        self._pen = ImageDraw.Draw(panel)

    def bar(self, x: float, y: float, width: float, height: float, color: Color) -> None:
        self._pen.rectangle([v * SUPERSAMPLE for v in (x, y, x + max(width, 0.5), y + height)], fill=color)

    def text(self, x: float, y: float, text: str, size: int, color: Color) -> None:
        self._pen.text((x * SUPERSAMPLE, y * SUPERSAMPLE), text, fill=color, font=font(size * SUPERSAMPLE))

    def legend(self, colors: dict[str, Color]) -> None:
        for index, (name, color) in enumerate(colors.items()):
            x = LEFT + 110 * index
            self.bar(x, 44, 12, 12, color)
            self.text(x + 18, 42, name, 13, FAINT)


def _draw_times(drawing: _Drawing, results: Sequence[Result], top: float) -> float:
    """Bars of all steps on one scale; returns where they end."""
    longest = max(result.step_s.median for result in results if result.step_s)
    for result in results:
        assert result.step_s is not None
        assert result.split is not None
        drawing.text(16, top + 8, result.precision, 15, INK)
        pieces = {name: getattr(result.split, name) for name in _PIECES}
        full = (WIDTH - LEFT - RIGHT) * result.step_s.median / longest
        x = float(LEFT)
        for name, seconds in pieces.items():
            width = full * seconds / sum(pieces.values())
            drawing.bar(x, top + 6, width, ROW - 18, _PIECES[name])
            x += width
        label = f"{result.step_s.median * 1e3:.4g} ms"
        drawing.text(x + 8, top + 8, label if result.mfu is None else f"{label}, MFU {result.mfu:.0%}", 14, INK)
        top += ROW
    return top


def _draw_memory(drawing: _Drawing, results: Sequence[Result], top: float) -> None:
    largest = max(result.allocated_bytes or 0 for result in results)
    for result in results:
        size = result.allocated_bytes or 0
        width = (WIDTH - LEFT - RIGHT) * size / largest
        drawing.text(16, top + 8, result.precision, 15, INK)
        drawing.bar(LEFT, top + 6, width, ROW - 18, _MEMORY)
        drawing.text(LEFT + width + 8, top + 8, format_gib(size), 14, INK)
        top += ROW
