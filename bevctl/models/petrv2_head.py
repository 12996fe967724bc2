"""Detection head of PETR: a class and a box of each query after every decoder layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from bevctl.batch import Batch
from bevctl.config.schema import ObjectHeadConfig, PetrConfig
from bevctl.models.layers import LayerNorm
from bevctl.models.petrv2_coder import decode
from bevctl.models.petrv2_loss import detection_losses
from bevctl.models.petrv2_position import inverse_sigmoid, sine_embedding
from bevctl.models.petrv2_transformer import ImageMemory, PetrTransformer
from bevctl.models.side_by_side import all_plain, multiplied, parameters_of, side_by_side
from bevctl.ops.backend import use_triton

WIDTHS = (2, 1, 3, 2, 2)
"""Channels of the regression heads, whose outputs side by side are a box's code."""
PRIOR = 0.01
"""Probability that a new head gives to every class."""
REACH = (61.2, 61.2, 10.0)
"""Predicted centres may be this far from the LiDAR, m."""


@dataclass(frozen=True)
class PetrOutputs:
    """What the head says about a batch after each of N layers, float32."""

    logits: Tensor
    """(N, B, Q, K) classes."""
    codes: Tensor
    """(N, B, Q, 10) boxes, see `petrv2_coder`."""


class RegressionBranch(nn.Module):
    """Two shared layers and a head for each piece of the code."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        # Upstream's dropout of probability zero holds the places 2 and 5.
        self.reg_branch = nn.Sequential(
            nn.Linear(channels, channels),
            nn.ReLU(),
            nn.Identity(),
            nn.Linear(channels, channels),
            nn.ReLU(),
            nn.Identity(),
        )
        self.task_heads = nn.ModuleList(
            [nn.Sequential(nn.Linear(channels, channels), nn.ReLU(), nn.Linear(channels, width)) for width in WIDTHS]
        )

    def forward(self, x: Tensor) -> Tensor:
        """(…, C) → (…, 10) float32."""
        shared = self.reg_branch(x)
        return torch.cat([head(shared).float() for head in self.task_heads], dim=-1)


def regressed(branches: Sequence[RegressionBranch], x: Tensor) -> Tensor:
    """Branch n of x[n], (N, R, C) → (N, R, 10), all at once."""
    shared = side_by_side([list(branch.reg_branch) for branch in branches], x)
    heads = [[cast("nn.Sequential", head) for head in branch.task_heads] for branch in branches]
    # The heads of a branch read the same: their first layers are one that is as wide as all.
    weights, biases = parameters_of([head[0] for of_branch in heads for head in of_branch])
    first = weights.view(len(x), -1, x.shape[2]), biases.view(len(x), -1)
    hidden = multiplied(first, shared).relu().unflatten(2, (len(WIDTHS), -1)).unbind(2)
    places = zip(zip(*heads, strict=True), hidden, strict=True)
    return torch.cat([multiplied(parameters_of([head[2] for head in of_place]), h) for of_place, h in places], dim=-1)


class PetrObjectHead(nn.Module):
    """Queries at learned reference points.

    `bounds` are those of the centres, x, y, z lower and upper, m.
    """

    lower: Tensor
    extent: Tensor

    def __init__(
        self,
        config: ObjectHeadConfig,
        petr: PetrConfig,
        classes: int,
        bounds: Sequence[float],
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.petr = config, petr
        hidden = petr.hidden
        self.reference_points = nn.Embedding(config.proposals, 3)
        nn.init.uniform_(self.reference_points.weight)
        self.query_embedding = query_mlp(3 * hidden // 2, hidden)
        self.transformer = PetrTransformer(petr, checkpointing)
        self.cls_branches = nn.ModuleList([_classifier(hidden, classes) for _ in range(petr.layers)])
        self.reg_branches = nn.ModuleList([RegressionBranch(hidden) for _ in range(petr.layers)])
        lower, upper = torch.tensor(bounds).view(2, 3)
        self.register_buffer("lower", lower, persistent=False)
        self.register_buffer("extent", upper - lower, persistent=False)

    def forward(self, memory: ImageMemory) -> PetrOutputs:
        """What queries say after each layer."""
        reference = self.reference_points.weight
        x, y, z = (sine_embedding(reference[:, axis] * (2 * math.pi), self.petr.hidden // 2) for axis in range(3))
        queries = torch.stack(self.transformer(self.query_embedding(torch.cat([y, x, z], dim=-1)), memory))
        logits, codes = self._branches(queries)
        return PetrOutputs(logits, self._placed(codes, memory.interval))

    def _branches(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Classes and boxes, (N, B, Q, K) and (N, B, Q, 10) float32, of the (N, B, Q, C) queries after each layer."""
        # One by one where operations are traced to their modules: a trace has torch's kernels.
        if use_triton(queries) and all_plain([self.cls_branches, self.reg_branches]):
            return self._branches_at_once(queries)
        logits = [branch(query).float() for branch, query in zip(self.cls_branches, queries, strict=True)]
        codes = [branch(query) for branch, query in zip(self.reg_branches, queries, strict=True)]
        return torch.stack(logits), torch.stack(codes)

    def _branches_at_once(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """The same in 800 operations fewer, forward and backward, which a small batch waits for on a GPU."""
        rows, shape = queries.flatten(1, 2), queries.shape[1:3]
        classes = side_by_side([list(cast("nn.Sequential", branch)) for branch in self.cls_branches], rows)
        boxes = regressed(cast("Sequence[RegressionBranch]", list(self.reg_branches)), rows)
        return classes.float().unflatten(1, shape), boxes.float().unflatten(1, shape)

    def _placed(self, codes: Tensor, interval: Tensor | None) -> Tensor:
        """(N, B, Q, 10) outputs → codes: centres beside their reference points, in m, and velocities in m/s."""
        reference = inverse_sigmoid(self.reference_points.weight)
        offset = torch.cat([codes[..., :2], codes[..., 4:5]], dim=-1)
        centre = (offset + reference).sigmoid() * self.extent + self.lower
        velocity = codes[..., 8:]
        if interval is not None:
            velocity = velocity / interval[:, None, None]
        return torch.cat([centre[..., :2], codes[..., 2:4], centre[..., 2:], codes[..., 5:8], velocity], dim=-1)

    def loss(self, outputs: PetrOutputs, batch: Batch) -> dict[str, Tensor]:
        """Weighted losses of each layer, in float32; the last layer's are called `layer_-1`.

        Samples without annotations weigh nothing, but their outputs stay part of the graph.
        """
        weight = self.config.loss_weight
        with torch.autocast(outputs.codes.device.type, enabled=False):
            classes, boxes = detection_losses(outputs.logits, outputs.codes, batch)
            classes, boxes = weight * self.config.class_weight * classes, weight * self.config.box_weight * boxes
        losses = {}
        for number, (class_loss, box_loss) in enumerate(zip(classes.unbind(), boxes.unbind(), strict=True)):
            layer = number if number + 1 < len(classes) else -1
            losses[f"loss/object/layer_{layer}_loss_cls"] = class_loss
            losses[f"loss/object/layer_{layer}_loss_bbox"] = box_loss
        return losses

    @torch.no_grad()
    def predict(self, outputs: PetrOutputs) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Boxes B × (n_i, 9), scores and labels, best first: those of the last layer, without suppression.

        A query may give boxes of several classes. Boxes centred out of reach are left out.
        """
        scores = outputs.logits[-1].sigmoid()
        classes = scores.shape[2]
        count = min(self.petr.predictions, scores[0].numel())
        scores, best = scores.flatten(1).topk(count, dim=1)
        labels, query = best % classes, best // classes
        codes = outputs.codes[-1].gather(1, query[..., None].expand(-1, -1, outputs.codes.shape[-1]))
        boxes = decode(codes)
        kept = (boxes[..., :3].abs() <= boxes.new_tensor(REACH)).all(-1)
        return (
            [b[k] for b, k in zip(boxes, kept, strict=True)],
            [s[k] for s, k in zip(scores, kept, strict=True)],
            [c[k] for c, k in zip(labels, kept, strict=True)],
        )


def query_mlp(channels_in: int, channels: int) -> nn.Sequential:
    """Embedding of a query's position, entries `0` and `2`."""
    return nn.Sequential(nn.Linear(channels_in, channels), nn.ReLU(), nn.Linear(channels, channels))


def _classifier(channels: int, classes: int) -> nn.Sequential:
    last = nn.Linear(channels, classes)
    nn.init.constant_(last.bias, -math.log((1 - PRIOR) / PRIOR))
    hidden = [[nn.Linear(channels, channels), LayerNorm(channels), nn.ReLU()] for _ in range(2)]
    return nn.Sequential(*hidden[0], *hidden[1], last)
