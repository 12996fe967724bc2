"""A model and a data set small enough to train hundreds of steps in a test, behind the real interfaces."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bevctl.batch import Batch
from bevctl.config.schema import Config, DataConfig, OptimConfig, PrecisionConfig, TrainConfig
from bevctl.console import Console
from bevctl.data.loader import collate
from bevctl.data.sample import Item, Sample
from bevctl.engine import parts as engine_parts
from bevctl.engine import run as engine_run
from bevctl.engine.dist import World

SAMPLES = 16


class PointNet(nn.Module):
    """Mean point features → two losses. BatchNorm and dropout make it depend on statistics and random state."""

    def __init__(self, plain: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 8)
        self.norm = nn.Identity() if plain else nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.0 if plain else 0.2)
        self.head = nn.Linear(8, 1)
        self.batches: list[list[str]] = []
        self.sabotage: Callable[[Batch, Tensor], Tensor] = lambda _, loss: loss

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        assert batch.points is not None
        self.batches.append(list(batch.tokens))
        points = torch.stack(batch.points)
        hidden = torch.relu(self.norm(self.embed(points).flatten(0, 1))).unflatten(0, points.shape[:2])
        error = self.head(self.dropout(hidden.mean(1)))[:, 0] - points.mean(1).sum(1)
        loss = self.sabotage(batch, error.float().square().mean())
        return {
            "loss/object/loss_heatmap": loss,
            "loss/object/loss_bbox": 0.1 * self.head.weight.float().square().sum(),
            "stats/object/matched_ious": error.detach().float().abs().mean(),
        }


class OverflowingNet(PointNet):
    """A model one part of which leaves the range of FP16 for the samples of one batch."""

    def __init__(self) -> None:
        super().__init__(plain=True)
        self.gain = nn.Module()
        self.gain.scale = nn.Linear(1, 1, bias=False)
        self.gain.forward = self._gain
        self.sabotage = self._overflow

    def _gain(self, x: Tensor) -> Tensor:
        return self.gain.scale(x * 3e4) / 3e4  # type: ignore[operator]

    def _overflow(self, batch: Batch, loss: Tensor) -> Tensor:
        factor = 30.0 if "sample-3" in batch.tokens else 0.1
        return loss + 0.0 * self.gain((0.1 + loss).view(1, 1).clamp(max=1.0) * factor).float().sum()


class PointData:
    """`SAMPLES` samples whose points come from (seed, epoch, index), as the real data set's augmentation does."""

    unreadable: frozenset[int] = frozenset()
    collate = staticmethod(collate)
    checkpoint_meta: ClassVar[dict[str, Any]] = {}

    def __init__(self, config: Config, split: str) -> None:
        self.config = config
        self.split = split
        self.notes: tuple[str, ...] = ()
        self.info = None

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: tuple[int, int]) -> Item:
        epoch, position = index
        problems = (f"samples/LIDAR_TOP/{position}.bin is truncated.",) if position in self.unreadable else ()
        rng = np.random.default_rng([self.config.seed, epoch, position])
        return Item(_sample(position, rng.random((6, 5), dtype=np.float32)), problems)


def _sample(position: int, points: Any) -> Sample:
    cameras = np.zeros((0, 4, 4))
    return Sample(
        token=f"sample-{position}",
        images=None,
        points=points,
        intrinsics=cameras,
        camera2lidar=cameras,
        times=np.zeros(0),
        image_aug=cameras,
        lidar_aug=np.eye(4),
        boxes=np.zeros((0, 9)),
        labels=np.zeros(0, dtype=np.int64),
        has_boxes=True,
    )


def point_config(work_dir: Path, **sections: Any) -> Config:
    """Two epochs of 8 batches of 2 on the CPU, without evaluation. `sections`: dicts of changes by section name."""
    base = Config(
        name="points",
        device="cpu",
        work_dir=str(work_dir),
        data=DataConfig(root=str(work_dir), max_bad_samples=2),
        train=TrainConfig(batch=2, workers=0, epochs=2, eval_interval=0, log_interval=4),
        optim=OptimConfig(lr=1e-2, warmup=3),
        precision=PrecisionConfig(dtype="fp32"),
    )
    changed = {name: dataclasses.replace(getattr(base, name), **values) for name, values in sections.items()}
    return dataclasses.replace(base, **changed)


class Bench:
    """Trains fake runs and keeps the models that were built, newest last."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, console: Console) -> None:
        self.models: list[PointNet] = []
        self.console = console
        self.plain = False
        """Builds models without BatchNorm and dropout: a sample's gradient does not depend on its batch."""
        self.sabotage: Callable[[Batch, Tensor], Tensor] | None = None
        for module in (engine_parts, engine_run):
            monkeypatch.setattr(module, "open_split", PointData)
        monkeypatch.setattr(engine_parts, "build_model", self._build)

    def _build(self, _: Config) -> PointNet:
        model = PointNet(self.plain)
        if self.sabotage is not None:
            model.sabotage = self.sabotage
        self.models.append(model)
        return model

    def train(self, config: Config, **options: Any) -> engine_run.RunResult:
        return engine_run.train(config, engine_run.RunOptions(**options), World(), self.console)

    @property
    def weights(self) -> dict[str, Tensor]:
        """State of the newest model."""
        return self.models[-1].state_dict()

    @property
    def order(self) -> list[list[str]]:
        """Tokens of each batch that the newest model saw."""
        return self.models[-1].batches
