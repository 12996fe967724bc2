"""A detector that mmdet3d builds from a config, behind the interface of our own models."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from bevctl.batch import Predictions
from bevctl.config.mmdet3d import installed, quiet, run_config
from bevctl.config.schema import Config
from bevctl.errors import BevctlError, ExitCode
from bevctl.foreign_batch import ForeignBatch
from bevctl.models.network import Network

_LAYER = re.compile(r"d\d+")
"""mmdet3d's name for the losses of a decoder layer, which are no task of their own."""


class Detector(Network):
    """Gives `detector` our interface. Parameters and modules are the detector's, under its own names.

    So checkpoints hold what mmengine's hold. Inputs go through the detector's own data preprocessor, which moves them
    to the device.
    """

    def __init__(self, detector: Any) -> None:
        super().__init__()
        self._behind = (detector,)  # a module in a tuple is no part: its parts are
        self._parameters, self._buffers, self._modules = detector._parameters, detector._buffers, detector._modules
        self._non_persistent_buffers_set = detector._non_persistent_buffers_set

    @property
    def detector(self) -> Any:
        """What mmdet3d built, in the mode that this module is in."""
        (detector,) = self._behind
        detector.training = self.training
        return detector

    def train(self, mode: bool = True) -> Detector:
        """As the detector does it, whose own frozen parts stay frozen; ours too."""
        self.training = mode
        self.detector.train(mode)
        for name in self._frozen:
            self.get_submodule(name).eval()
        return self

    def to(self, *args: Any, **kwargs: Any) -> Detector:
        """As of any module; the data preprocessor is told the device."""
        self.detector.to(*args, **kwargs)
        return self

    def forward(self, batch: ForeignBatch) -> dict[str, Tensor]:
        """Scalars: the detector's losses as `loss/<task>/…`, whose sum is the loss of the step, the rest `stats/…`."""
        return dict(_named(self._run(batch, "loss")))

    @torch.no_grad()
    def predict(self, batch: ForeignBatch) -> Predictions:
        """Boxes that the detector sees in a batch, best first.

        Raises:
            BevctlError: it predicts boxes in another frame than the LiDAR's (exit code 4).
        """
        found = [_objects(sample) for sample in self._run(batch, "predict")] if batch.size else []
        boxes, scores, labels = ([parts[i] for parts in found] for i in range(3))
        return Predictions(boxes, scores, labels)

    def _run(self, batch: ForeignBatch, mode: str) -> Any:
        detector = self.detector
        # On a CPU nothing is copied on the way, and some pipelines change their input in place.
        on_cpu = next(self.parameters()).device.type == "cpu"
        content = copy.deepcopy(batch.content) if on_cpu else batch.content
        data = detector.data_preprocessor(content, mode == "loss")
        return detector(**data, mode=mode) if isinstance(data, Mapping) else detector(*data, mode=mode)


def _named(losses: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Values as mmengine adds them up: means, sums of lists; what has "loss" in its name is minimised."""
    for name, value in losses.items():
        parts = value if isinstance(value, list | tuple) else [value]
        total = torch.stack([torch.as_tensor(part).float().mean() for part in parts]).sum()
        task, _, leaf = name.rpartition(".")
        if not task or _LAYER.fullmatch(task):
            task, leaf = "object", name
        yield f"{'loss' if 'loss' in name else 'stats'}/{task}/{leaf}", total


def _objects(sample: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(n, 9) boxes of ours, (n,) scores and (n,) labels of a predicted sample."""
    instances = sample.pred_instances_3d
    boxes = instances.bboxes_3d
    if not type(boxes).__name__.startswith("LiDAR"):
        raise BevctlError(
            f"This detector predicts {type(boxes).__name__}, and only boxes in the LiDAR frame can be scored.",
            "Train with --set train.eval_interval=0, and evaluate with mmdet3d's own tools.",
            ExitCode.RUN_FAILED,
        )
    rows = boxes.tensor.float()
    velocity = rows[:, 7:9] if rows.shape[1] >= 9 else rows.new_zeros(len(rows), 2)
    ours = torch.cat([boxes.gravity_center.float(), boxes.dims.float(), boxes.yaw.float()[:, None], velocity], dim=1)
    scores = instances.scores_3d.float()
    best_first = scores.argsort(descending=True, stable=True)
    return ours[best_first], scores[best_first], instances.labels_3d.long()[best_first]


def build_mmdet3d(config: Config) -> Detector:
    """The detector of an mmdet3d config, with the initial weights that it asks for.

    Raises:
        BevctlError: nobody allowed to run the config, mmdet3d is not installed or cannot build the model.
    """
    assert config.model.mmdet3d is not None
    source = run_config(config.model.mmdet3d.config)
    with installed(), quiet():
        from mmdet3d.registry import MODELS

        try:
            detector = MODELS.build(copy.deepcopy(source.model))  # some write into what they are built from
        except (KeyError, TypeError, ValueError, AssertionError, AttributeError) as error:
            reason = " ".join(str(error).split())[:300]
            raise BevctlError(
                f"mmdet3d cannot build the model: {type(error).__name__}: {reason}.",
                "Check `model` of the config; own modules are named in its custom_imports.",
            ) from error
        detector.init_weights()
    network = Detector(detector)
    network.freeze(config.model.freeze)
    return network
