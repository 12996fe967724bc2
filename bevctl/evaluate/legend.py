"""The legend of a picture: keys written from left to right."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageDraw

from bevctl.evaluate.canvas import INK, SUPERSAMPLE, Color, font, stroke
from bevctl.evaluate.draw_bev import HEIGHTS, height_colors

_SPACE = 26.0
"""Between two keys, in pixels of the finished picture like every length here."""


class LegendRow:
    """One row of keys on an enlarged panel, its middle at height `y`."""

    def __init__(self, panel: Image.Image, y: float) -> None:
        self.draw = ImageDraw.Draw(panel)
        self.font = font(13 * SUPERSAMPLE)
        self.x = 12.0
        self.y = y

    def text(self, text: str, color: Color = INK, space: float = _SPACE) -> None:
        place = (self.x * SUPERSAMPLE, self.y * SUPERSAMPLE)
        self.draw.text(place, text, fill=color, font=self.font, anchor="lm")
        self.x += self.draw.textlength(text, font=self.font) / SUPERSAMPLE + space

    def line(self, text: str, color: Color, width: float, dash: tuple[float, float] | None) -> None:
        """A stroke as boxes are drawn with, and what it stands for."""
        ends = np.array([[self.x, self.y], [self.x + 34, self.y]]) * SUPERSAMPLE
        stroke(self.draw, ends[0], ends[1], color, width, dash)
        self.x += 42
        self.text(text)

    def swatch(self, name: str, color: Color) -> None:
        """A square in the colour of a class, and the class."""
        corners = np.array([self.x, self.y - 7, self.x + 14, self.y + 7]) * SUPERSAMPLE
        self.draw.rounded_rectangle(tuple(corners), radius=2 * SUPERSAMPLE, fill=color)
        self.x += 21
        self.text(name.replace("_", " "))

    def scale(self, text: str, length: int = 160) -> None:
        """The colours of point heights between their two ends."""
        low, high = HEIGHTS
        self.text(text, space=10)
        self.text(f"{low:g} m", space=6)
        left, top = round(self.x * SUPERSAMPLE), (self.y - 6) * SUPERSAMPLE
        for step, color in enumerate(height_colors(np.linspace(low, high, length * SUPERSAMPLE))):
            self.draw.line([(left + step, top), (left + step, top + 12 * SUPERSAMPLE)], fill=tuple(color.tolist()))
        self.x += length + 6
        self.text(f"{high:g} m")
