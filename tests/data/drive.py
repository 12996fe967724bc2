"""A car on a bumpy, winding drive, whose cameras and LiDAR fire at times of their own: what info files say of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scipy.spatial.transform import Rotation

from bevctl.data.info import CameraInfo, InfoFile, SampleInfo
from bevctl.geometry import Array, invert_rigid, rigid
from tests.data import infos as made

CAMERAS = ("CAM_FRONT", "CAM_BACK")
DELAYS = {"CAM_FRONT": -0.035, "CAM_BACK": -0.01}
START = 1_533_201_470.0
LIDAR2EGO = rigid(Rotation.from_euler("zyx", [-1.57, 0.01, 0.02]).as_matrix(), [0.94, 0.0, 1.84])


@dataclass(frozen=True)
class Drive:
    """Keyframes half a second apart and `per_keyframe` images of each camera in that time."""

    seed: int = 0
    keyframes: int = 4
    per_keyframe: int = 6
    missing: frozenset[tuple[str, int]] = field(default_factory=frozenset)
    """(camera, number of the image) that were never taken."""

    def ego2global(self, time: float) -> Array:
        """At `time` s after the start."""
        rng = np.random.default_rng(self.seed)
        speed, turn = rng.uniform(0, 15), rng.uniform(-0.5, 0.5)
        angles = rng.uniform(-3, 3) + turn * time, 0.03 * np.sin(7 * time), 0.02 * np.cos(5 * time)
        place = rng.uniform(-2000, 2000, 3) * [1, 1, 0.01] + speed * time * rng.uniform(-1, 1, 3)
        return rigid(Rotation.from_euler("zyx", angles).as_matrix(), place)

    def camera2ego(self, camera: str) -> Array:
        """Looks forward or back; mounted a little askew."""
        yaw = {"CAM_FRONT": 0.02, "CAM_BACK": 3.1}[camera]
        forward = np.array([[0.0, 0.0, 1.0], [-1.0, 0.0, 0.0], [0.0, -1.0, 0.0]])
        return rigid(Rotation.from_euler("zyx", [yaw, 0.01, -0.02]).as_matrix() @ forward, [1.7, 0.1, 1.5])

    def image_time(self, camera: str, number: int) -> float:
        """Of image `number`; image 0 belongs to the first keyframe. A camera's clock is not quite even."""
        jitter = 0.004 * np.sin(3.0 * number + len(camera))
        return number * 0.5 / self.per_keyframe + DELAYS[camera] + float(jitter)

    def camera2global(self, camera: str, number: int) -> Array:
        return self.ego2global(self.image_time(camera, number)) @ self.camera2ego(camera)

    def project(self, camera: str, number: int, point: Array) -> Array:
        """Homogeneous pixel (u·d, v·d, d) of a (3,) point of the world."""
        seen = invert_rigid(self.camera2global(camera, number)) @ [*point, 1.0]
        pixel: Array = made.INTRINSICS @ seen[:3]
        return pixel

    def lidar2global(self, keyframe: int) -> Array:
        pose: Array = self.ego2global(0.5 * keyframe) @ LIDAR2EGO
        return pose

    def path(self, camera: str, number: int) -> str:
        return f"{'samples' if number % self.per_keyframe == 0 else 'sweeps'}/{camera}/{number}.jpg"

    def sample(self, keyframe: int, scene: str | None = "scene") -> SampleInfo:
        """As read from an info file without camera sweeps."""
        number = keyframe * self.per_keyframe
        global2lidar = invert_rigid(self.lidar2global(keyframe))
        return SampleInfo(
            token=f"sample-{keyframe}",
            timestamp=START + 0.5 * keyframe,
            lidar_path=f"samples/LIDAR_TOP/n015-2018__LIDAR_TOP__{keyframe}.bin",
            lidar2ego=LIDAR2EGO,
            ego2global=self.ego2global(0.5 * keyframe),
            cameras={
                camera: CameraInfo(
                    self.path(camera, number),
                    made.INTRINSICS,
                    global2lidar @ self.camera2global(camera, number),
                    START + self.image_time(camera, number),
                )
                for camera in CAMERAS
                if (camera, number) not in self.missing
            },
            sweeps=(),
            scene=scene,
        )

    def info(self, scene: str | None = "scene") -> InfoFile:
        """All keyframes, without camera sweeps."""
        samples = tuple(self.sample(keyframe, scene) for keyframe in range(self.keyframes))
        return InfoFile(Path("infos.pkl"), "mmdet3d-1.1", "v1.0-mini", samples)

    def petr(self) -> dict[str, Any]:
        """A document of PETR's layout: each keyframe lists the moments before it, nearest first."""
        return {
            "infos": [self._petr_entry(keyframe) for keyframe in range(self.keyframes)],
            "metadata": {"version": "v1.0-trainval"},
        }

    def _petr_entry(self, keyframe: int) -> dict[str, Any]:
        (entry,) = made.infos(made.legacy(made.BOXES))["infos"]
        ego2global = self.ego2global(0.5 * keyframe)
        last = keyframe * self.per_keyframe
        numbers = range(last - 1, -1, -1)
        return {
            **entry,
            "token": f"sample-{keyframe}",
            "timestamp": round((START + 0.5 * keyframe) * 1e6),
            "lidar2ego_rotation": _quaternion(LIDAR2EGO),
            "lidar2ego_translation": LIDAR2EGO[:3, 3].tolist(),
            "ego2global_rotation": _quaternion(ego2global),
            "ego2global_translation": ego2global[:3, 3].tolist(),
            "cams": {c: self._petr_image(c, last, keyframe) for c in CAMERAS if (c, last) not in self.missing},
            "sweeps": [
                {c: self._petr_image(c, n, keyframe) for c in CAMERAS if (c, n) not in self.missing} for n in numbers
            ],
        }

    def _petr_image(self, camera: str, number: int, keyframe: int) -> dict[str, Any]:
        camera2lidar = invert_rigid(self.lidar2global(keyframe)) @ self.camera2global(camera, number)
        intrinsics = np.eye(4)
        intrinsics[:3, :3] = made.INTRINSICS
        lidar2camera = invert_rigid(camera2lidar)
        return {
            "data_path": self.path(camera, number),
            "type": camera,
            "timestamp": round((START + self.image_time(camera, number)) * 1e6),
            "is_key_frame": number % self.per_keyframe == 0,
            "sample_data_token": f"{camera}-{number}",
            "sensor2lidar_rotation": camera2lidar[:3, :3],
            "sensor2lidar_translation": camera2lidar[:3, 3],
            "cam_intrinsic": made.INTRINSICS,
            "intrinsics": intrinsics,
            "extrinsics": lidar2camera.T,
            "lidar2img": intrinsics @ lidar2camera,
        }


def _quaternion(pose: Array) -> list[float]:
    x, y, z, w = Rotation.from_matrix(pose[:3, :3]).as_quat()
    return [float(w), float(x), float(y), float(z)]
