"""A detector and a data set behind mmdet3d's interface; a config names this module in its custom_imports."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import torch
from mmdet3d.registry import DATASETS, MODELS
from torch import Tensor, nn


@DATASETS.register_module()
class ToyNuScenesDataset:
    """Points and order from NumPy's global generator, as augmentation and CBGSDataset draw them.

    Sample `poisoned` holds a NaN; the file of sample `lost` is not there.
    """

    def __init__(self, data_root: str, ann_file: str, length: int = 16, poisoned: int = -1, lost: int = -1) -> None:
        self.files = (data_root, ann_file)
        self.length, self.poisoned, self.lost = length, poisoned, lost
        self.metainfo = {"classes": ("car", "pedestrian")}
        self.order = np.random.permutation(length)  # noqa: NPY002

    def __len__(self) -> int:
        return self.length

    def get_data_info(self, index: int) -> dict[str, Any]:
        return {"sample_idx": self.order[index], "token": f"sample-{self.order[index]}"}

    def __getitem__(self, position: int) -> dict[str, Any]:
        index = self.order[position]
        if index == self.lost:
            raise FileNotFoundError(f"samples/{index}.bin")
        points = torch.from_numpy(np.random.standard_normal((6, 4)).astype(np.float32))  # noqa: NPY002
        if index == self.poisoned:
            points[0, 0] = torch.nan
        return {"inputs": {"points": points}, "data_samples": types.SimpleNamespace(target=float(points[1:].sum()))}


class Preprocessor(nn.Module):
    """Stacks the points on the device, and leaves its mark on them as careless pipelines do."""

    place: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("place", torch.zeros(()), persistent=False)

    def forward(self, data: dict[str, Any], training: bool) -> dict[str, Any]:
        points = [cloud.to(self.place.device) for cloud in data["inputs"]["points"]]
        for cloud in points:
            cloud *= 0.5 if training else 1.0
        return {"inputs": {"points": torch.stack(points)}, "data_samples": data["data_samples"]}


@MODELS.register_module()
class ToyDetector(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.data_preprocessor = Preprocessor()
        self.backbone = nn.Linear(4, width)
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.2)
        self.bbox_head = nn.Linear(width, 1)
        self.scale = nn.Parameter(torch.zeros(()))

    def init_weights(self) -> None:
        nn.init.normal_(self.bbox_head.weight)

    def forward(self, inputs: dict[str, Tensor], data_samples: list[Any], mode: str) -> Any:
        hidden = torch.relu(self.norm(self.backbone(inputs["points"]).flatten(0, 1)))
        score = self.bbox_head(self.dropout(hidden.unflatten(0, inputs["points"].shape[:2]).mean(1)))[:, 0]
        if mode == "predict":
            return [self._seen(value) for value in score]
        target = score.new_tensor([sample.target for sample in data_samples])
        error = (score * self.scale.exp() - target).float()
        return {
            "task0.loss_heatmap": error.square(),
            "d0.loss_bbox": [error.abs().mean(), 0.1 * self.scale.square()],
            "matched_ious": error.detach().abs().mean(),
        }

    def _seen(self, score: Tensor) -> Any:
        tensor = torch.tensor([[1.0, 2.0, 0.0, 4.0, 2.0, 1.5, 0.1, 0.0, 0.0]]).repeat(2, 1)
        boxes = LiDARInstance3DBoxes(tensor)
        scores = torch.stack([score.float().sigmoid().cpu() * 0.5, score.new_tensor(0.9).float().cpu()])
        found = types.SimpleNamespace(bboxes_3d=boxes, scores_3d=scores, labels_3d=torch.tensor([0, 1]))
        return types.SimpleNamespace(pred_instances_3d=found)


class LiDARInstance3DBoxes:
    """Rows x, y, z of the bottom, l, w, h, yaw, vx, vy."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.dims, self.yaw = tensor[:, 3:6], tensor[:, 6]

    @property
    def gravity_center(self) -> Tensor:
        centre = self.tensor[:, :3].clone()
        centre[:, 2] += self.tensor[:, 5] / 2
        return centre
