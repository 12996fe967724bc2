"""The cameras: shaded images of the scene, and what each pixel shows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from bevctl.data.synth.ground import COLOURS
from bevctl.data.synth.objects import MAX_PARTS
from bevctl.data.synth.raycast import CODES, GROUND, Hits, Window, cast
from bevctl.data.synth.rig import Camera, image_size
from bevctl.data.synth.scene import Scene
from bevctl.geometry import box_corners, invert_rigid, transform_points

Array = NDArray[np.float64]
Floats = NDArray[np.float32]

NEAR = 0.2
"""Closest depth that is drawn, m."""
GROUND_ITERATIONS = 1
SUN = np.array([0.45, 0.35, 0.82])
"""Direction to the sun in the global frame, unit length."""
ZENITH = np.array([92, 142, 206], dtype=np.float32)
HORIZON = np.array([206, 218, 228], dtype=np.float32)
SMOOTH_DEPTH = 14.0
"""Depth up to which a pixel is smaller than a cell of the ground, so that cells are blended, m."""
HAZE = 160.0
"""Distance over which colours fade to the horizon's by 63 %, m."""
SHADOW_CELL = 0.1
SHADOW_REACH = 60.0
SHADOW_LIGHT = np.float32(0.56)
PANE = np.array([52, 66, 82], dtype=np.float32)
FACES = ([0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 5, 4], [1, 2, 6, 5], [2, 3, 7, 6], [3, 0, 4, 7])
"""Corners (of `geometry.box_corners`) of each face of a box."""
EDGES = ((0, 1), (1, 2), (2, 3), (3, 0), (4, 5), (5, 6), (6, 7), (7, 4), (0, 4), (1, 5), (2, 6), (3, 7))
"""Corners (of `geometry.box_corners`) that each edge of a box joins."""


@dataclass(frozen=True)
class Picture:
    """A rendered image and the hits behind it."""

    pixels: NDArray[np.uint8]
    """(H, W, 3) RGB."""
    hits: Hits
    """The ray parameter is depth along the optical axis, m."""


def render(scene: Scene, camera: Camera, time: float, scale: float) -> Picture:
    """What `camera` sees at `time`, at `scale` times 1600×900 pixels."""
    hits, rays = trace(scene, camera, time, scale)
    origin = (scene.ego2global(time) @ camera.camera2ego)[:3, 3]
    view = _View(scene, scene.poses(time), origin.astype(np.float32))
    pixels = _sky(camera, scale).copy()
    surface, depth, rays = hits.surface.ravel(), hits.distance.ravel(), rays.reshape(3, -1)
    for paint, shown in ((_ground_colours, surface == GROUND), (_solid_colours, surface >= 0)):
        where = np.flatnonzero(shown)
        places = view.origin[:, None] + depth[where] * rays[:, where]
        pixels[where] = _hazed(paint(view, places, depth[where], surface[where]), depth[where])
    return Picture(pixels.reshape(*hits.surface.shape, 3), hits)


@dataclass(frozen=True)
class _View:
    """A scene at the time of one image."""

    scene: Scene
    poses: Array
    """(n, 4) of the solids."""
    origin: Floats
    """(3,) position of the camera, global."""


def trace(scene: Scene, camera: Camera, time: float, scale: float) -> tuple[Hits, Floats]:
    """First hits of the pixels' rays, and the rays (3, H, W) in the global frame."""
    camera2global = scene.ego2global(time) @ camera.camera2ego
    poses = scene.poses(time)
    rays = np.einsum("ij,jrc->irc", camera2global[:3, :3].astype(np.float32), _pixel_rays(camera, scale))
    windows = _windows(scene.boxes(poses), camera, camera2global, scale)
    hits = cast(camera2global[:3, 3], rays, scene.solids, poses, windows, scene.ground, GROUND_ITERATIONS)
    return hits, rays


@lru_cache(maxsize=12)
def _pixel_rays(camera: Camera, scale: float) -> Floats:
    """(3, H, W) rays through the pixels' centres in the camera frame, unit depth."""
    width, height = image_size(scale)
    k = camera.intrinsics(scale)
    u = (np.arange(width) + 0.5 - k[0, 2]) / k[0, 0]
    v = (np.arange(height) + 0.5 - k[1, 2]) / k[1, 1]
    x, y = np.meshgrid(u, v)
    return np.stack([x, y, np.ones_like(x)]).astype(np.float32)


def _windows(boxes: Array, camera: Camera, camera2global: Array, scale: float) -> list[Window | None]:
    """The pixel rectangle around each of the boxes (n, 7, global frame); None where it is out of the picture."""
    corners = transform_points(invert_rigid(camera2global), box_corners(boxes).reshape(-1, 3)).reshape(-1, 8, 3)
    return [_window(c, camera.intrinsics(scale), image_size(scale)) for c in corners]


def _window(corners: Array, intrinsics: Array, size: tuple[int, int]) -> Window | None:
    """Pixel rectangle around (8, 3) corners of a box in the camera frame, cut at the near plane."""
    ends = corners[np.array(EDGES)]
    depth = ends[..., 2] - NEAR
    crossing = depth[:, 0] * depth[:, 1] < 0
    share = depth[crossing, 0] / (depth[crossing, 0] - depth[crossing, 1])
    cuts = ends[crossing, 0] + share[:, None] * (ends[crossing, 1] - ends[crossing, 0])
    visible = np.concatenate([corners[corners[:, 2] >= NEAR], cuts])
    if len(visible) == 0:
        return None
    pixels = visible[:, :2] / visible[:, 2:] * np.diag(intrinsics)[:2] + intrinsics[:2, 2]
    low = np.maximum(np.floor(pixels.min(axis=0)), 0).astype(int)
    high = np.minimum(np.ceil(pixels.max(axis=0)), size).astype(int)
    if (low >= high).any():
        return None
    return slice(low[1], high[1]), slice(low[0], high[0])


@lru_cache(maxsize=12)
def _sky(camera: Camera, scale: float) -> NDArray[np.uint8]:
    """(H · W, 3) colours of a picture with nothing in it; the car stays level, so that they never change."""
    rays = np.einsum("ij,jrc->irc", camera.camera2ego[:3, :3].astype(np.float32), _pixel_rays(camera, scale))
    up = (rays[2] / np.sqrt((rays**2).sum(axis=0))).clip(0, 1).reshape(-1, 1) ** 0.6
    return (HORIZON + (ZENITH - HORIZON) * up).astype(np.uint8)


def _hazed(colours: Floats, depth: Floats) -> NDArray[np.uint8]:
    """(P, 3) colours faded towards the horizon's with depth (P,)."""
    haze = np.exp(depth * np.float32(-1 / HAZE))[:, None]
    return (HORIZON + (colours - HORIZON) * haze).clip(0, 255).astype(np.uint8)


def _ground_colours(view: _View, places: Floats, depth: Floats, _surface: NDArray[np.int32]) -> Floats:
    """(P, 3) colours of ground at `places` (3, P): the material, speckled, darker where a solid keeps the sun away."""
    x, y, _ = places
    colours = COLOURS[view.scene.ground.material_at(x, y)]
    close = depth < SMOOTH_DEPTH
    colours[close] = view.scene.ground.colour_at(x[close], y[close])
    speckle = _speckle()[(y * 20).astype(np.int32) & 255, (x * 20).astype(np.int32) & 255]
    shadow = _shadows(view)
    cells = ((places[1::-1] - view.origin[1::-1, None] + SHADOW_REACH) * (1 / SHADOW_CELL)).astype(np.int32)
    near = ((cells >= 0) & (cells < len(shadow))).all(axis=0)
    dark = near & shadow[tuple(np.where(near, cells, 0))]
    return colours * np.where(dark, speckle * SHADOW_LIGHT, speckle)[:, None]


@lru_cache(maxsize=1)
def _speckle() -> Floats:
    """(256, 256) brightness factors; the same everywhere, as asphalt is."""
    return np.random.default_rng(0).normal(1.0, 0.035, (256, 256)).astype(np.float32)


def _shadows(view: _View) -> NDArray[np.bool_]:
    """Square raster around the camera, (y, x): True where the sun does not reach the ground."""
    side = int(2 * SHADOW_REACH / SHADOW_CELL)
    image = Image.new("1", (side, side))
    draw = ImageDraw.Draw(image)
    corners = box_corners(view.scene.boxes(view.poses))
    # The shadow of a box is the hull of its footprint and of its top moved away from the sun.
    fallen = corners[..., :2] - SUN[:2] / SUN[2] * (corners[..., 2:] - view.poses[:, None, 2:3])
    cells = (fallen - view.origin[:2] + SHADOW_REACH) / SHADOW_CELL
    for outline in cells:
        if (outline.max(axis=0) > 0).all() and (outline.min(axis=0) < side).all():
            for face in FACES:
                draw.polygon([(float(a), float(b)) for a, b in outline[face]], fill=1)
    return np.asarray(image)


def _solid_colours(view: _View, places: Floats, _depth: Floats, surface: NDArray[np.int32]) -> Floats:
    """(P, 3) colours of solids at `places` (3, P): the part's colour under sun and sky, windows on buildings."""
    colours = _palette(view.scene, view.poses)[surface]
    is_building = np.array([solid.kind == "building" for solid in view.scene.solids])
    wall = np.flatnonzero(is_building[surface // CODES] & (surface % 6 < 4))
    foot = view.poses.astype(np.float32)[surface[wall] // CODES]
    dx, dy, height = places[:, wall] - foot[:, :3].T
    c, s = np.cos(foot[:, 3]), np.sin(foot[:, 3])
    along = np.where(surface[wall] % 6 < 2, c * dy - s * dx, c * dx + s * dy)
    pane = (np.abs(along % 2.6 - 1.3) < 0.7) & (np.abs((height - 0.4) % 2.9 - 1.4) < 0.75) & (height > 0.9)
    colours[wall[pane]] = colours[wall[pane]] * np.float32(0.25) + PANE
    return colours


def _palette(scene: Scene, poses: Array) -> Floats:
    """(solids · CODES, 3) lit colour of each surface code."""
    palette = np.zeros((len(scene.solids), MAX_PARTS, 6, 3), dtype=np.float32)
    for index, (solid, yaw) in enumerate(zip(scene.solids, poses[:, 3], strict=True)):
        c, s = np.cos(yaw), np.sin(yaw)
        normals = np.array([(-c, -s, 0), (c, s, 0), (s, -c, 0), (-s, c, 0), (0, 0, -1), (0, 0, 1)])
        light = 0.52 + 0.5 * np.maximum(normals @ SUN, 0)
        light[4] = 0.3
        palette[index, : len(solid.parts)] = solid.colours[:, None, :] * light[None, :, None]
    return palette.reshape(-1, 3)
