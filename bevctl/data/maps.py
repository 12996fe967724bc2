"""Bird's-eye-view map masks from nuScenes' map expansion, read and drawn through nuscenes-devkit."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bevctl.errors import BevctlError
from bevctl.geometry import Array, rigid, rotation_z, yaw_of

LAYERS: dict[str, tuple[str, ...]] = {
    "drivable_area": ("drivable_area",),
    "ped_crossing": ("ped_crossing",),
    "walkway": ("walkway",),
    "stop_line": ("stop_line",),
    "carpark_area": ("carpark_area",),
    "road_divider": ("road_divider",),
    "lane_divider": ("lane_divider",),
    "divider": ("road_divider", "lane_divider"),
}
"""Layers of the map expansion that make up each map class."""

Bound = tuple[float, float, float]
"""Lower end, upper end and cell, m."""


def map_file(root: str | Path, location: str) -> Path:
    """Where the map expansion of `location` lies."""
    return Path(root) / "maps" / "expansion" / f"{location}.json"


class MapLayers:
    """The layers of one map as shapely geometries in metres (global frame), built once and kept.

    Raises BevctlError (exit 2) for a map file that the devkit cannot open.
    """

    def __init__(self, root: str | Path, location: str) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the devkit and its plotting libraries announce deprecations
                from nuscenes.map_expansion.map_api import NuScenesMap

                self._map = NuScenesMap(dataroot=str(root), map_name=location)
        except Exception as error:  # the devkit raises plain Exception and AssertionError
            raise BevctlError(
                f"The map file {map_file(root, location)} cannot be opened: {error!s:.200}.",
                "Get the nuScenes map expansion 1.3 or newer, or set model.map to null.",
            ) from error
        self._layers: dict[str, tuple[list[Any], Array]] = {}

    def near(self, layer: str, area: Array) -> list[Any]:
        """Geometries of `layer` whose bounding box touches that of `area`, (n, 2) global x, y."""
        if layer not in self._layers:
            geometries = self._read(layer)
            bounds = np.array([g.bounds for g in geometries], dtype=np.float64).reshape(-1, 4)
            self._layers[layer] = geometries, bounds
        geometries, bounds = self._layers[layer]
        low, high = area.min(axis=0), area.max(axis=0)
        touches = (bounds[:, :2] <= high).all(axis=1) & (bounds[:, 2:] >= low).all(axis=1)
        return [geometries[i] for i in np.flatnonzero(touches)]

    def _read(self, layer: str) -> list[Any]:
        records = getattr(self._map, layer)
        if layer in self._map.non_geometric_line_layers:
            found = [self._map.extract_line(record["line_token"]) for record in records]
            return [line for line in found if not line.is_empty]
        if layer != "drivable_area":
            found = [self._map.extract_polygon(record["polygon_token"]) for record in records]
            return [polygon for polygon in found if not polygon.is_empty and polygon.is_valid]
        tokens = [token for record in records for token in record["polygon_tokens"]]
        return [part for token in tokens for part in _repaired(self._map.extract_polygon(token))]


def _repaired(polygon: Any) -> Iterator[Any]:
    """The valid polygons that make up `polygon`: road surfaces are large, and one bad corner must not lose them."""
    from shapely.geometry import Polygon
    from shapely.validation import make_valid

    waiting = [polygon if polygon.is_valid else make_valid(polygon)]
    while waiting:
        geometry = waiting.pop()
        if isinstance(geometry, Polygon) and not geometry.is_empty:
            yield geometry
        waiting.extend(getattr(geometry, "geoms", ()))


@functools.lru_cache(maxsize=8)
def load_map(root: str, location: str) -> MapLayers:
    """`MapLayers`, once a process; forked loader workers share what their parent has loaded."""
    return MapLayers(root, location)


def map_masks(
    layers: MapLayers, classes: Sequence[str], lidar2global: Array, lidar_aug: Array, xbound: Bound, ybound: Bound
) -> NDArray[np.uint8]:
    """(K, X, Y) 0/1 masks of the map classes as the augmented LiDAR frame sees them.

    Of the 4×4 pose `lidar2global` the heading and the position count, as in the devkit. Rotation, translation, scale
    and flips of `lidar_aug` are followed. Cells are drawn as the devkit's `get_map_mask` draws them: polygons filled
    through rounded corners, lines two cells wide.
    """
    global2cell = _global_to_cell(lidar2global, lidar_aug, xbound, ybound)
    shape = _cells(ybound), _cells(xbound)  # rows are y while drawing
    drawn = {
        layer: _draw(layers, layer, global2cell, shape)
        for layer in dict.fromkeys(layer for name in classes for layer in LAYERS[name])
    }
    masks = [np.maximum.reduce([drawn[layer] for layer in LAYERS[name]]) for name in classes]
    return np.stack(masks).transpose(0, 2, 1).copy()


def _cells(bound: Bound) -> int:
    return round((bound[1] - bound[0]) / bound[2])


def _global_to_cell(lidar2global: Array, lidar_aug: Array, xbound: Bound, ybound: Bound) -> Array:
    """(3, 3) affine map in the plane: global metres → (column = x cell, row = y cell), both continuous."""
    level = rigid(rotation_z(yaw_of(lidar2global)), lidar2global[:3, 3])
    plane = np.ix_([0, 1, 3], [0, 1, 3])
    aug2cell = np.diag([1 / xbound[2], 1 / ybound[2], 1.0])
    aug2cell[:2, 2] = -xbound[0] / xbound[2], -ybound[0] / ybound[2]
    cell: Array = aug2cell @ lidar_aug[plane] @ np.linalg.inv(level[plane])
    return cell


def _draw(layers: MapLayers, layer: str, global2cell: Array, shape: tuple[int, int]) -> NDArray[np.uint8]:
    """(rows, columns) mask of one layer."""
    from nuscenes.map_expansion.map_api import NuScenesMapExplorer
    from shapely.affinity import affine_transform
    from shapely.geometry import MultiPolygon, Polygon

    height, width = shape
    corners = np.array([[0, 0, 1], [width, 0, 1], [width, height, 1], [0, height, 1]], dtype=np.float64)
    area = (corners @ np.linalg.inv(global2cell).T)[:, :2]
    window = Polygon(area)
    coefficients = [*global2cell[0, :2], *global2cell[1, :2], *global2cell[:2, 2]]
    mask = np.zeros(shape, dtype=np.uint8)
    for geometry in layers.near(layer, area):
        visible = affine_transform(geometry.intersection(window), coefficients)
        parts = [p for p in getattr(visible, "geoms", [visible]) if isinstance(p, type(geometry)) and not p.is_empty]
        if parts and isinstance(geometry, Polygon):
            mask = NuScenesMapExplorer.mask_for_polygons(MultiPolygon(parts), mask)
        elif parts:  # one by one, as the devkit cannot iterate over several with shapely 2
            for line in parts:
                mask = NuScenesMapExplorer.mask_for_lines(line, mask)
    return mask
