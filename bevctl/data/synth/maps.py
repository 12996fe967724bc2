"""The map of each location: the devkit's map expansion (version 1.3) and the semantic prior mask."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from bevctl.data.synth.road import Area, Layout, Road

Array = NDArray[np.float64]
Record = dict[str, Any]

MASK_TOKENS = {
    "boston-seaport": "36092f0b03a857c6a3403e25b4b7aab3",
    "singapore-hollandvillage": "37819e65e09e5547b8a3ceaefba56bb2",
    "singapore-onenorth": "53992ee3023e5494b90c316c183be829",
    "singapore-queenstown": "93406b464a165eaba6d9de76ca09f5da",
}
"""Names of the mask files, which the devkit's BitMap looks up by these hashes."""
CELLS_PER_METRE = 10
"""Resolution of the masks, fixed by the devkit."""
LIST_LAYERS = (
    "polygon", "line", "node", "drivable_area", "road_segment", "road_block", "lane", "lane_connector", "ped_crossing",
    "walkway", "stop_line", "carpark_area", "road_divider", "lane_divider", "traffic_light",
)  # fmt: skip


def make_token(*parts: object) -> str:
    """32 hexadecimal digits that depend on `parts` alone."""
    return hashlib.md5("/".join(map(str, parts)).encode(), usedforsecurity=False).hexdigest()


class MapExpansion:
    """The vector map of one location, filled layout by layout."""

    def __init__(self, location: str, canvas_edge: tuple[float, float]) -> None:
        self.location = location
        self.canvas_edge = canvas_edge
        self.layers: dict[str, list[Record]] = {name: [] for name in LIST_LAYERS}
        self.arcs: dict[str, list[Record]] = {}

    def document(self) -> Record:
        """The JSON document that NuScenesMap reads."""
        return {
            "version": "1.3",
            "canvas_edge": list(self.canvas_edge),
            **self.layers,
            "arcline_path_3": self.arcs,
            "connectivity": {token: {"incoming": [], "outgoing": []} for token in self.arcs},
        }

    def add(self, layout: Layout) -> None:
        """Add every layer of one scene's layout."""
        road = layout.road
        (drivable,) = layout.layer("drivable_area")
        drivable_token = self._add("drivable_area", polygon_tokens=[self._polygon(drivable, road)])
        segment = self._add(
            "road_segment",
            polygon_token=self._polygon(drivable, road),
            is_intersection=False,
            drivable_area_token=drivable_token,
        )
        blocks = self._add_lanes(layout, segment)
        for area in layout.layer("walkway"):
            self._add("walkway", polygon_token=self._polygon(area, road))
        for area in layout.layer("carpark_area"):
            self._add(
                "carpark_area",
                polygon_token=self._polygon(area, road),
                orientation=float(road.heading_at(sum(area.s) / 2)),
                road_block_token=blocks[0],
            )
        crossings = [
            self._add("ped_crossing", polygon_token=self._polygon(area, road), road_segment_token=segment)
            for area in layout.layer("ped_crossing")
        ]
        # The layout lists two stop lines for each crossing, in the crossings' order.
        for number, area in enumerate(layout.layer("stop_line")):
            self._add(
                "stop_line",
                polygon_token=self._polygon(area, road),
                stop_line_type="PED_CROSSING",
                ped_crossing_tokens=[crossings[number // 2]],
                traffic_light_tokens=[],
                road_block_token="",
            )
        self._add_dividers(layout, segment)

    def _add_lanes(self, layout: Layout, segment: str) -> list[str]:
        """A lane and a road block for each lane of the layout; tokens of the blocks."""
        blocks = []
        for lane, area in zip(layout.lanes, layout.layer("lane"), strict=True):
            start, end = area.s if lane.direction > 0 else area.s[::-1]
            edges = [self._line(layout.road.point(s, np.array(area.t))) for s in (start, end)]
            ends = {"from_edge_line_token": edges[0], "to_edge_line_token": edges[1]}
            outline = self._polygon(area, layout.road)
            blocks.append(self._add("road_block", polygon_token=outline, road_segment_token=segment, **ends))
            token = self._add(
                "lane",
                polygon_token=self._polygon(area, layout.road),
                lane_type="CAR",
                left_lane_divider_segments=[],
                right_lane_divider_segments=[],
                **ends,
            )
            self.arcs[token] = [_arc(layout.road, lane.t, (start, end))]
        return blocks

    def _add_dividers(self, layout: Layout, segment: str) -> None:
        for divider in layout.dividers:
            for chord in divider.chords(layout.road):
                line = self._line(chord)
                if divider.layer == "road_divider":
                    self._add("road_divider", line_token=line, road_segment_token=segment)
                    continue
                kinds = ("DASHED_SEGMENT_WHITE", "NIL")
                nodes = self.layers["line"][-1]["node_tokens"]
                segments = [{"node_token": n, "segment_type": k} for n, k in zip(nodes, kinds, strict=True)]
                self._add("lane_divider", line_token=line, lane_divider_segments=segments)

    def _add(self, layer: str, **fields: Any) -> str:
        token = make_token(self.location, layer, len(self.layers[layer]))
        self.layers[layer].append({"token": token, **fields})
        return token

    def _polygon(self, area: Area, road: Road) -> str:
        return self._add("polygon", exterior_node_tokens=self._nodes(area.outline(road)), holes=[])

    def _line(self, points: Array) -> str:
        return self._add("line", node_tokens=self._nodes(points))

    def _nodes(self, points: Array) -> list[str]:
        return [self._add("node", x=round(float(x), 4), y=round(float(y), 4)) for x, y in points]


def _arc(road: Road, t: float, s: tuple[float, float]) -> Record:
    """A lane's centre line as the devkit's three-segment arc path, of which only the first segment has a length."""
    bend = road.curvature / (1 - road.curvature * t)
    backwards = np.pi if s[1] < s[0] else 0.0
    poses = [[*map(float, road.point(end, t)), float(road.heading_at(end)) + backwards] for end in s]
    turns_left = (bend > 0) == (s[1] > s[0])
    return {
        "start_pose": poses[0],
        "end_pose": poses[1],
        "shape": "LSL" if turns_left else "RSR",
        "radius": float(1 / abs(bend)),
        "segment_length": [abs(s[1] - s[0]) * (1 - road.curvature * t), 0.0, 0.0],
    }


def draw_mask(layouts: Sequence[Layout], canvas_edge: tuple[float, float]) -> Image.Image:
    """The semantic prior: 255 on roads, walkways and car parks; the first row is the map's northern edge."""
    width, height = (int(np.ceil(edge * CELLS_PER_METRE)) for edge in canvas_edge)
    image = Image.new("L", (width, height))
    draw = ImageDraw.Draw(image)
    for layout in layouts:
        for layer in ("drivable_area", "walkway", "carpark_area"):
            for area in layout.layer(layer):
                outline = area.outline(layout.road) * CELLS_PER_METRE
                draw.polygon([(float(x), height - float(y)) for x, y in outline], fill=255)
    return image
