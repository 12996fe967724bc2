"""Puts objects and buildings along a road so that nothing ever touches anything else, the ego vehicle included."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bevctl.data.synth.crowd import Crowd
from bevctl.data.synth.objects import CLASSES, Colour, Solid, make_background, make_object
from bevctl.data.synth.road import Layout

USUAL_TRAVEL = 30.0
"""Drives up to this long get the classes' own numbers of objects, m."""
ATTEMPTS = 150
ATTEMPTS_IN_VIEW = 110
"""Attempts to place an object in view, before one out of view will do."""
CYCLES = ("motorcycle", "bicycle")
FACADES: tuple[Colour, ...] = ((176, 150, 128), (150, 152, 158), (190, 178, 156), (142, 112, 98), (168, 172, 176))

Spot = tuple[float, float, float, float]
"""s, t, turn, speed of a solid at time 0."""


def populate(layout: Layout, ego_speed: float, duration: float, rng: np.random.Generator) -> list[Solid]:
    """Annotated objects of every class and the static background of a scene.

    A drive longer than `USUAL_TRAVEL` gets proportionally more. Raises RuntimeError if a class finds no room at all.
    """
    crowd = Crowd(layout, ego_speed, duration)
    repeat = max(1.0, layout.travel / USUAL_TRAVEL)
    for solid in [*_buildings(layout, rng), *_street_furniture(layout, rng)]:
        crowd.add(solid)
    for name, spec in CLASSES.items():
        wanted = round(int(rng.integers(spec.count[0], spec.count[1] + 1)) * repeat)
        placed = sum(_place(crowd, name, rng) for _ in range(wanted))
        if placed == 0:
            raise RuntimeError(f"no room for a {name} in a scene of {layout.travel:.0f} m")
    return crowd.solids


def _place(crowd: Crowd, name: str, rng: np.random.Generator) -> bool:
    for attempt in range(ATTEMPTS):
        place = str(rng.choice(CLASSES[name].places))
        s, t, turn, speed = PLACES[place](crowd, name, rng)
        attribute = _attribute(name, speed, rng)
        solid = make_object(name, rng, s=s, t=t, turn=turn, speed=speed, attribute=attribute)
        if crowd.add(solid, keep_view=attempt < ATTEMPTS_IN_VIEW):
            return True
    return False


def _attribute(name: str, speed: float, rng: np.random.Generator) -> str:
    if name in ("barrier", "traffic_cone"):
        return ""
    if name == "pedestrian":
        return "pedestrian.moving" if speed > 0 else "pedestrian.standing"
    if name in CYCLES:
        return "cycle.with_rider" if speed > 0 else "cycle.without_rider"
    if speed > 0:
        return "vehicle.moving"
    return "vehicle.parked" if rng.random() < 0.7 else "vehicle.stopped"


def _along(crowd: Crowd, name: str, rng: np.random.Generator) -> float:
    reach = CLASSES[name].reach
    return float(rng.uniform(-reach, crowd.layout.travel + reach))


def _in_lane(crowd: Crowd, name: str, rng: np.random.Generator) -> Spot:
    """Driving; where it is half-way through the scene decides, so that oncoming traffic passes the ego vehicle."""
    lane = crowd.layout.lanes[int(rng.integers(len(crowd.layout.lanes)))]
    slow = 0.6 if name in CYCLES else 1.0
    if lane.direction > 0:
        speed = max(2.5, crowd.ego_speed + float(rng.uniform(-0.6, 0.6)))
    else:
        speed = float(rng.uniform(4.0, 8.0)) * slow
    s = _along(crowd, name, rng) - lane.direction * speed * crowd.duration / 2
    t = lane.t + float(rng.uniform(-0.2, 0.2))
    return s, t, 0.0 if lane.direction > 0 else np.pi, speed


def _on_shoulder(crowd: Crowd, name: str, rng: np.random.Generator) -> Spot:
    """Parked along the road."""
    lane = crowd.layout.shoulders[int(rng.integers(2))]
    turn = (0.0 if lane.direction > 0 else np.pi) + float(rng.normal(0, 0.03))
    return _along(crowd, name, rng), lane.t, turn, 0.0


def _across_shoulder(crowd: Crowd, name: str, rng: np.random.Generator) -> Spot:
    """Closing off the shoulder: the object's width lies across or along it."""
    lane = crowd.layout.shoulders[int(rng.integers(2))]
    return _along(crowd, name, rng), lane.t, float(rng.integers(2)) * np.pi / 2 + float(rng.normal(0, 0.08)), 0.0


def _on_shoulder_edge(crowd: Crowd, name: str, rng: np.random.Generator) -> Spot:
    """Beside the lanes; bicycles ride there, other things stand."""
    lane = crowd.layout.shoulders[int(rng.integers(2))]
    t = lane.t - lane.direction * float(rng.uniform(-0.9, 0.9))
    speed = float(rng.uniform(2.5, 4.5)) if name == "bicycle" else 0.0
    s = _along(crowd, name, rng) - lane.direction * speed * crowd.duration / 2
    return s, t, 0.0 if lane.direction > 0 else np.pi, speed


def _on_walkway(crowd: Crowd, name: str, rng: np.random.Generator) -> Spot:
    """Walking along either walkway in either direction, or standing; bicycles are left there."""
    low, high = crowd.layout.walkways[int(rng.integers(2))]
    t = float(rng.uniform(low + 0.5, high - 0.5))
    if name == "bicycle":
        return _along(crowd, name, rng), t, float(rng.uniform(-np.pi, np.pi)), 0.0
    direction = int(rng.integers(2)) * 2 - 1
    speed = float(rng.uniform(0.8, 1.7)) if rng.random() < 0.75 else 0.0
    s = _along(crowd, name, rng) - direction * speed * crowd.duration / 2
    return s, t, 0.0 if direction > 0 else np.pi, speed


def _on_crossing(crowd: Crowd, _name: str, rng: np.random.Generator) -> Spot:
    """Crossing the road; in the middle of the scene somewhere on the crossing."""
    crossings = crowd.layout.layer("ped_crossing")
    near = [a for a in crossings if -20 < a.s[0] < crowd.layout.travel + 20]
    area = near[int(rng.integers(len(near)))]
    direction = int(rng.integers(2)) * 2 - 1
    speed = float(rng.uniform(0.8, 1.5))
    t = float(rng.uniform(*area.t)) - direction * speed * crowd.duration / 2
    return float(rng.uniform(area.s[0] + 0.5, area.s[1] - 0.5)), t, direction * np.pi / 2, speed


def _in_car_park(crowd: Crowd, name: str, rng: np.random.Generator) -> Spot:
    """Parked across the car park: cars in two rows, longer vehicles along its middle."""
    parks = crowd.layout.layer("carpark_area")
    area = parks[int(rng.integers(len(parks)))]
    low, high = area.t
    if CLASSES[name].size[0] > 6:
        inset = CLASSES[name].size[0] * 0.54 + 0.5
        return float(rng.uniform(area.s[0] + inset, area.s[1] - inset)), (low + high) / 2, 0.0, 0.0
    row = float(rng.choice([low + 3.2, high - 3.2]))
    turn = float(rng.choice([-1, 1])) * np.pi / 2 + float(rng.normal(0, 0.03))
    return float(rng.uniform(area.s[0] + 1.5, area.s[1] - 1.5)), row, turn, 0.0


PLACES: dict[str, Callable[[Crowd, str, np.random.Generator], Spot]] = {
    "lane": _in_lane,
    "shoulder": _on_shoulder,
    "shoulder_across": _across_shoulder,
    "shoulder_edge": _on_shoulder_edge,
    "walkway": _on_walkway,
    "crossing": _on_crossing,
    "car_park": _in_car_park,
}


def _buildings(layout: Layout, rng: np.random.Generator) -> list[Solid]:
    """A row on each side; behind the car parks where there is one."""
    solids = []
    first, last = layout.ends
    parks = layout.layer("carpark_area")
    for side, walkway in zip((-1, 1), layout.walkways, strict=True):
        s = first + float(rng.uniform(0, 6))
        while s < last:
            length, depth, height = float(rng.uniform(10, 20)), float(rng.uniform(8, 12)), float(rng.uniform(4.5, 13))
            edge = walkway[0] if side < 0 else walkway[1]
            here = [a for a in parks if a.t[0] * side >= 0 and a.s[0] < s + length + 3 and s - 3 < a.s[1]]
            for park in here:
                edge = park.t[0] if side < 0 else park.t[1]
            middle = edge + side * (depth / 2 + float(rng.uniform(2.5, 5.0)))
            colour = FACADES[int(rng.integers(len(FACADES)))]
            solids.append(make_background("building", (length, depth, height), colour, s + length / 2, middle))
            s += length + float(rng.uniform(2, 9))
    return solids


def _street_furniture(layout: Layout, rng: np.random.Generator) -> list[Solid]:
    """Lamp posts and trees on the outer edge of the walkways."""
    solids = []
    first, last = layout.ends
    for side, walkway in zip((-1, 1), layout.walkways, strict=True):
        for s in np.arange(first + float(rng.uniform(0, 12)), last, 17.0):
            t = (walkway[0] if side < 0 else walkway[1]) + side * 0.9
            if rng.random() < 0.5:
                height = float(rng.uniform(5, 7))
                solids.append(make_background("pole", (0.24, 0.24, height), (96, 100, 104), float(s), t))
            else:
                crown, height = float(rng.uniform(1.8, 2.6)), float(rng.uniform(4, 5.5))
                green = (58 + int(rng.integers(30)), 104 + int(rng.integers(36)), 58)
                solids.append(make_background("tree", (crown, crown, height), green, float(s), t))
    return solids
