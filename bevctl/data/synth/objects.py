"""What stands and moves in a scene: solids made of boxes, and the ten classes that are annotated.

A solid's own frame has x along its heading, y to its left, z up, the origin on the ground below its middle.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

MARGIN = 0.04
"""How much smaller than its annotated box an object is, on each side, m: range noise then stays inside the box."""
MAX_PARTS = 8
PAINTS = ((178, 42, 42), (44, 76, 150), (222, 222, 218), (64, 68, 74), (34, 104, 72), (206, 164, 56), (132, 140, 150))
"""Body colours, RGB."""
DARK, GLASS, WHITE, ORANGE, SKIN, TRUNK = (
    (34, 34, 38), (58, 76, 92), (232, 232, 230), (232, 98, 28), (206, 160, 128), (92, 70, 52)
)  # fmt: skip
Colour = tuple[int, int, int]
Part = tuple[float, float, float, float, float, float, Colour | None]
"""x0, x1, y0, y1 in -0.5..0.5 of length and width, z0, z1 in 0..1 of height, and a colour; None: the body's colour."""


@dataclass(frozen=True)
class ClassSpec:
    """How one detection class looks in this world and what it is called in the tables."""

    category: str
    size: tuple[float, float, float]
    """Mean length, width, height, m."""
    count: tuple[int, int]
    """Fewest and most objects in a scene."""
    places: tuple[str, ...]
    """Where it may be put: names in `placement.PLACES`."""
    reach: float
    """How far before and after the ego vehicle's drive it may be, m along the road: small things stay close, where
    the LiDAR meets them."""
    reflectivity: float
    """LiDAR intensity at normal incidence, 0..255."""
    parts: tuple[Part, ...]


_WHEELS: tuple[Part, ...] = (
    (-0.40, -0.24, -0.48, 0.48, 0.0, 0.20, DARK),
    (0.24, 0.40, -0.48, 0.48, 0.0, 0.20, DARK),
)
_RIDER: tuple[Part, ...] = (
    (-0.22, 0.04, -0.5, 0.5, 0.42, 0.84, None),
    (-0.18, 0.0, -0.22, 0.22, 0.84, 1.0, SKIN),
)

CLASSES: dict[str, ClassSpec] = {
    "bus": ClassSpec(
        "vehicle.bus.rigid", (11.0, 2.9, 3.5), (2, 2), ("lane",), 27.0, 90.0,
        (
            (-0.5, 0.5, -0.5, 0.5, 0.10, 0.46, None), (-0.49, 0.5, -0.48, 0.48, 0.46, 0.82, GLASS),
            (-0.5, 0.5, -0.5, 0.5, 0.82, 1.0, None), *_WHEELS,
        ),
    ),
    "trailer": ClassSpec(
        "vehicle.trailer", (11.5, 2.7, 3.9), (2, 2), ("car_park", "car_park", "shoulder"), 27.0, 60.0,
        (
            (-0.5, 0.38, -0.5, 0.5, 0.28, 1.0, WHITE), (-0.5, 0.5, -0.2, 0.2, 0.18, 0.28, DARK),
            (-0.42, -0.18, -0.48, 0.48, 0.0, 0.2, DARK),
        ),
    ),
    "truck": ClassSpec(
        "vehicle.truck", (7.2, 2.5, 3.0), (2, 3), ("lane", "shoulder", "car_park"), 27.0, 80.0,
        (
            (-0.5, 0.18, -0.5, 0.5, 0.2, 1.0, None), (0.22, 0.48, -0.46, 0.46, 0.14, 0.5, None),
            (0.22, 0.46, -0.45, 0.45, 0.5, 0.78, GLASS), (-0.5, 0.5, -0.2, 0.2, 0.12, 0.2, DARK), *_WHEELS,
        ),
    ),
    "construction_vehicle": ClassSpec(
        "vehicle.construction", (6.2, 2.7, 3.1), (2, 3), ("car_park", "shoulder"), 25.0, 120.0,
        (
            (-0.5, 0.12, -0.4, 0.4, 0.2, 0.56, (226, 168, 30)), (-0.22, 0.1, -0.3, 0.3, 0.56, 1.0, GLASS),
            (0.12, 0.46, -0.1, 0.1, 0.36, 0.52, (226, 168, 30)), (0.4, 0.5, -0.5, 0.5, 0.02, 0.4, (120, 96, 40)),
            (-0.48, 0.2, -0.5, -0.3, 0.0, 0.24, DARK), (-0.48, 0.2, 0.3, 0.5, 0.0, 0.24, DARK),
        ),
    ),
    "car": ClassSpec(
        "vehicle.car", (4.6, 1.95, 1.7), (7, 9), ("lane", "shoulder", "car_park"), 25.0, 100.0,
        (
            (-0.5, 0.5, -0.5, 0.5, 0.16, 0.56, None), (-0.38, 0.2, -0.44, 0.44, 0.56, 0.96, GLASS),
            (-0.32, 0.12, -0.42, 0.42, 0.96, 1.0, None), *_WHEELS,
        ),
    ),
    "motorcycle": ClassSpec(
        "vehicle.motorcycle", (2.1, 0.8, 1.6), (3, 4), ("lane", "shoulder"), 16.0, 110.0,
        ((-0.5, 0.5, -0.14, 0.14, 0.0, 0.34, DARK), (-0.36, 0.3, -0.32, 0.32, 0.2, 0.5, (168, 28, 36)), *_RIDER),
    ),
    "bicycle": ClassSpec(
        "vehicle.bicycle", (1.75, 0.65, 1.75), (3, 4), ("shoulder_edge", "shoulder_edge", "walkway"), 10.0, 50.0,
        ((-0.5, -0.16, -0.18, 0.18, 0.0, 0.36, DARK), (0.16, 0.5, -0.18, 0.18, 0.0, 0.36, DARK),
         (-0.4, 0.4, -0.2, 0.2, 0.3, 0.46, (40, 132, 160)), *_RIDER),
    ),
    "barrier": ClassSpec(
        "movable_object.barrier", (0.55, 2.4, 1.0), (4, 6), ("shoulder_across",), 14.0, 160.0,
        (
            (-0.5, 0.5, -0.5, 0.5, 0.0, 0.12, DARK), (-0.3, 0.3, -0.5, 0.5, 0.16, 0.5, ORANGE),
            (-0.3, 0.3, -0.5, 0.5, 0.5, 0.72, WHITE), (-0.3, 0.3, -0.5, 0.5, 0.72, 1.0, ORANGE),
        ),
    ),
    "pedestrian": ClassSpec(
        "human.pedestrian.adult", (0.75, 0.7, 1.76), (7, 9), ("walkway", "crossing"), 10.0, 40.0,
        (
            (-0.1, 0.5, -0.36, -0.04, 0.0, 0.48, (48, 54, 78)), (-0.5, 0.1, 0.04, 0.36, 0.0, 0.48, (48, 54, 78)),
            (-0.36, 0.36, -0.5, 0.5, 0.46, 0.84, None), (-0.24, 0.24, -0.26, 0.26, 0.84, 1.0, SKIN),
        ),
    ),
    "traffic_cone": ClassSpec(
        "movable_object.trafficcone", (0.45, 0.45, 1.05), (5, 7), ("shoulder_edge",), 6.0, 200.0,
        (
            (-0.5, 0.5, -0.5, 0.5, 0.0, 0.08, DARK), (-0.42, 0.42, -0.42, 0.42, 0.08, 0.4, ORANGE),
            (-0.32, 0.32, -0.32, 0.32, 0.4, 0.66, WHITE), (-0.22, 0.22, -0.22, 0.22, 0.66, 1.0, ORANGE),
        ),
    ),
}  # fmt: skip
"""The ten detection classes, largest first: big ones are placed while there is most room."""


@dataclass(frozen=True)
class Solid:
    """One rigid thing made of boxes, and how it moves in road coordinates.

    It heads `turn` rad to the left of the road's direction and moves at `speed` m/s along its heading.
    """

    kind: str
    """A detection class, or "building", "pole", "tree", "ego"."""
    size: tuple[float, float, float]
    """Length, width, height of its (annotated) box, m."""
    parts: Array
    """(P ≤ MAX_PARTS, 6) lower and upper corner of each part in its own frame, m."""
    colours: NDArray[np.uint8]
    """(P, 3) RGB."""
    reflectivity: float
    s: float
    """Road coordinates at time 0, m."""
    t: float
    turn: float
    speed: float
    attribute: str = ""
    """nuScenes attribute name; empty where the class has none."""

    @property
    def is_annotated(self) -> bool:
        return self.kind in CLASSES


def make_parts(
    parts: tuple[Part, ...], size: tuple[float, float, float], body: Colour, margin: float
) -> tuple[Array, NDArray[np.uint8]]:
    """(P, 6) corners in metres and (P, 3) colours of `parts` in a box of `size`, `margin` inside its faces."""
    fractions = np.array([part[:6] for part in parts])
    span = np.array(size) - 2 * margin
    low, high = fractions[:, [0, 2, 4]] * span, fractions[:, [1, 3, 5]] * span
    low[:, 2] += margin
    high[:, 2] += margin
    colours = np.array([part[6] or body for part in parts], dtype=np.uint8)
    return np.concatenate([low, high], axis=1), colours


def make_object(
    name: str, rng: np.random.Generator, *, s: float, t: float, turn: float, speed: float, attribute: str
) -> Solid:
    """An object of class `name` with a size and a colour drawn from `rng`."""
    spec = CLASSES[name]
    length, width, height = (float(round(mean * rng.uniform(0.92, 1.08), 3)) for mean in spec.size)
    size = (length, width, height)
    body = PAINTS[int(rng.integers(len(PAINTS)))]
    shapes = spec.parts
    if attribute == "cycle.without_rider":
        # The box ends where the vehicle does.
        size = (length, width, round(height * 0.56, 3))
        shapes = tuple((*p[:4], p[4] / 0.56, p[5] / 0.56, p[6]) for p in shapes if p[5] < 0.56)
    parts, colours = make_parts(shapes, size, body, MARGIN)
    return Solid(name, size, parts, colours, spec.reflectivity, s, t, turn, speed, attribute)


def make_background(kind: str, size: tuple[float, float, float], colour: Colour, s: float, t: float) -> Solid:
    """A building, pole or tree; buildings reach into the ground so that no gap shows where it is uneven."""
    shapes: dict[str, tuple[Part, ...]] = {
        "building": ((-0.5, 0.5, -0.5, 0.5, -0.1, 1.0, None),),
        "pole": ((-0.5, 0.5, -0.5, 0.5, -0.1, 1.0, None),),
        "tree": (
            (-0.09, 0.09, -0.09, 0.09, -0.1, 0.4, TRUNK),
            (-0.5, 0.5, -0.5, 0.5, 0.4, 0.8, None),
            (-0.32, 0.32, -0.32, 0.32, 0.8, 1.0, None),
        ),
    }
    parts, colours = make_parts(shapes[kind], size, colour, 0.0)
    return Solid(kind, size, parts, colours, 45.0, s, t, 0.0, 0.0)
