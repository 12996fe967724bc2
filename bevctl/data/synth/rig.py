"""The sensors of the car: nominal mounting of nuScenes' six cameras and of its roof LiDAR.

Ego frame: x forward, y left, z up, origin on the ground below the rear axle. Camera frame: x right, y down, z forward.
LiDAR frame: x right, y forward, z up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bevctl.geometry import rigid, rotation_z

Array = NDArray[np.float64]

IMAGE_WIDTH, IMAGE_HEIGHT = 1600, 900
PRINCIPAL_POINT = (816.0, 491.0)
RINGS = 32
ELEVATIONS = (-30.67, 10.67)
"""Elevation of ring 0 and of the last ring, degrees."""
LIDAR2EGO = rigid(rotation_z(-np.pi / 2), (0.94, 0.0, 1.84))


@dataclass(frozen=True)
class Camera:
    """A camera of the full-size rig."""

    channel: str
    position: tuple[float, float, float]
    """In the ego frame, m."""
    yaw: float
    """Viewing direction, degrees to the left of forward."""
    focal: float
    """Focal length in pixels of a 1600-pixel-wide image."""
    delay: float
    """Exposure minus the LiDAR's time, s. The cameras fire in turn, as on the real car, but closer together, so that
    moving objects stay where the LiDAR sees them to within 3 cm."""

    @property
    def camera2ego(self) -> Array:
        """(4, 4) transform."""
        yaw = np.deg2rad(self.yaw)
        c, s = np.cos(yaw), np.sin(yaw)
        return rigid(np.array([[s, 0.0, c], [-c, 0.0, s], [0.0, -1.0, 0.0]]), self.position)

    def intrinsics(self, scale: float) -> Array:
        """(3, 3) of an image `scale` times full size."""
        u, v = PRINCIPAL_POINT
        matrix = np.array([[self.focal, 0.0, u], [0.0, self.focal, v], [0.0, 0.0, 1.0]])
        matrix[:2] *= scale
        return matrix


CAMERAS = (
    Camera("CAM_FRONT", (1.70, 0.016, 1.51), 0.0, 1266.0, -0.0030),
    Camera("CAM_FRONT_RIGHT", (1.55, -0.493, 1.50), -56.0, 1261.0, -0.0025),
    Camera("CAM_FRONT_LEFT", (1.52, 0.495, 1.51), 55.0, 1272.0, -0.0035),
    Camera("CAM_BACK", (0.03, 0.003, 1.58), 180.0, 809.0, -0.0015),
    Camera("CAM_BACK_LEFT", (1.04, 0.485, 1.59), 108.0, 1257.0, -0.0010),
    Camera("CAM_BACK_RIGHT", (1.01, -0.481, 1.56), -110.0, 1259.0, -0.0020),
)


def image_size(scale: float) -> tuple[int, int]:
    """Width and height in pixels of an image `scale` times full size."""
    return round(IMAGE_WIDTH * scale), round(IMAGE_HEIGHT * scale)
