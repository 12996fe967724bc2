"""The ground: what it is made of, cell by cell, from the same outlines as the map, and how high it lies."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from bevctl.data.synth.road import Area, Divider, Layout

Array = NDArray[np.float64]
Floats = NDArray[np.float32]

GRASS, WALKWAY, ASPHALT, CAR_PARK, WHITE_PAINT, YELLOW_PAINT = range(6)
COLOURS = np.array(
    [(98, 122, 72), (158, 152, 144), (84, 86, 90), (112, 104, 106), (226, 226, 222), (222, 182, 62)], dtype=np.float32
)
"""RGB of each material."""
REFLECTIVITY = np.array([34.0, 26.0, 12.0, 18.0, 92.0, 76.0])
"""LiDAR intensity of each material, 0..255."""
CELL = 0.05
"""Side of a cell, m: a third of a marking's width."""
MARKING_WIDTH = 0.15
DASH, DASH_GAP = 3.0, 3.0
ZEBRA_BAR = 0.5
AMPLITUDE = 0.04
"""Half the height of the ground's waves, m."""
WAVE_NUMBERS = (1 / 9.0, 1 / 11.0)
"""Radians per metre of the waves along x and y."""


class Ground:
    """Material and height of the ground in a square around the drive; grass beyond it."""

    def __init__(self, layout: Layout, rng: np.random.Generator) -> None:
        middle = layout.road.point(layout.travel / 2, 0.0)
        half = layout.ends[1] - layout.travel / 2 + 15.0
        self.origin: Array = middle - half
        self.phase = rng.uniform(0, 2 * np.pi, 2)
        self.materials = self._paint(layout, int(np.ceil(2 * half / CELL)))

    def _paint(self, layout: Layout, side: int) -> NDArray[np.uint8]:
        image = Image.new("L", (side, side), GRASS)
        draw = ImageDraw.Draw(image)
        layers = (("drivable_area", ASPHALT), ("walkway", WALKWAY), ("carpark_area", CAR_PARK))
        for layer, material in layers:
            for area in layout.layer(layer):
                self._fill(draw, area.outline(layout.road), material)
        for area in layout.layer("stop_line"):
            self._fill(draw, area.outline(layout.road), WHITE_PAINT)
        for area in layout.layer("ped_crossing"):
            for bar in _zebra(area):
                self._fill(draw, bar.outline(layout.road), WHITE_PAINT)
        for divider in layout.dividers:
            material = YELLOW_PAINT if divider.layer == "road_divider" else WHITE_PAINT
            for stripe in _stripes(divider):
                self._fill(draw, stripe.outline(layout.road), material)
        return np.asarray(image)

    def _fill(self, draw: ImageDraw.ImageDraw, outline: Array, material: int) -> None:
        cells = (outline - self.origin) / CELL
        draw.polygon([(float(x), float(y)) for x, y in cells], fill=material)

    def material_at(self, x: NDArray[np.floating], y: NDArray[np.floating]) -> NDArray[np.uint8]:
        """Material of global positions (m), same shape."""
        side = len(self.materials)
        column = ((x - self.origin[0].astype(x.dtype)) * (1 / CELL)).astype(np.int32)
        row = ((y - self.origin[1].astype(y.dtype)) * (1 / CELL)).astype(np.int32)
        inside = (column >= 0) & (column < side) & (row >= 0) & (row < side)
        flat = np.where(inside, row * side + column, 0)
        found: NDArray[np.uint8] = np.where(inside, self.materials.reshape(-1)[flat], np.uint8(GRASS))
        return found

    def colour_at(self, x: Floats, y: Floats) -> Floats:
        """(P, 3) colours of global positions (P,), blended between the four nearest cells."""
        across, along = (
            (p - np.float32(o)) / np.float32(CELL) + np.float32(0.5) for p, o in zip((x, y), self.origin, strict=True)
        )
        right, up = across - np.floor(across), along - np.floor(along)
        half = np.float32(CELL / 2)
        colours = np.zeros((len(x), 3), dtype=np.float32)
        for step_x, weight_x in ((-half, 1 - right), (half, right)):
            for step_y, weight_y in ((-half, 1 - up), (half, up)):
                colours += (weight_x * weight_y)[:, None] * COLOURS[self.material_at(x + step_x, y + step_y)]
        return colours

    def height_at(self, x: NDArray[np.floating], y: NDArray[np.floating]) -> NDArray[np.floating]:
        """Height of global positions (m), same shape and dtype."""
        kx, ky = WAVE_NUMBERS
        # Phases are taken at the origin, so that single precision is enough for positions of some hundred metres.
        waves = np.sin((x - self.origin[0].astype(x.dtype)) * kx + self.phase[0].astype(x.dtype))
        waves += np.sin((y - self.origin[1].astype(y.dtype)) * ky + self.phase[1].astype(y.dtype))
        return waves * x.dtype.type(AMPLITUDE / 2)

    def distance(self, origin: Array, directions: NDArray[np.floating], iterations: int) -> NDArray[np.floating]:
        """Ray parameter at which rays from `origin` (3,) along `directions` (3, N) reach the ground; inf if never.

        A fixed-point iteration on the height: it converges for the gentle waves above wherever the ray is steeper
        than the ground.
        """
        x, y, z = directions
        kind = directions.dtype.type
        down = z < -1e-3
        slope = np.where(down, z, kind(-1.0))
        distance = -kind(origin[2]) / slope
        for _ in range(iterations):
            height = self.height_at(kind(origin[0]) + distance * x, kind(origin[1]) + distance * y)
            distance = (height - kind(origin[2])) / slope
        return np.where(down, distance, kind(np.inf))


def _zebra(area: Area) -> list[Area]:
    """Bars along the road over the width of a crossing."""
    low, high = area.t
    starts = np.arange(low + ZEBRA_BAR, high - ZEBRA_BAR, 2 * ZEBRA_BAR)
    return [Area(area.layer, area.s, (float(t), float(t) + ZEBRA_BAR)) for t in starts]


def _stripes(divider: Divider) -> list[Area]:
    """A double line between directions, dashes between lanes."""
    half = MARKING_WIDTH / 2
    if divider.layer == "road_divider":
        return [Area(divider.layer, divider.s, (divider.t + o - half, divider.t + o + half)) for o in (-0.15, 0.15)]
    starts = np.arange(divider.s[0] + 1, divider.s[1] - DASH, DASH + DASH_GAP)
    return [Area(divider.layer, (float(s), float(s) + DASH), (divider.t - half, divider.t + half)) for s in starts]
