"""TransFusion detection head (Bai et al., CVPR 2022) as in BEVFusion: a query for each of the best heatmap peaks."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bevctl.batch import Batch
from bevctl.config.schema import ObjectHeadConfig
from bevctl.errors import BevctlError
from bevctl.models.box_coder import CODE_WEIGHTS, BevGrid, decode
from bevctl.models.detection_loss import detection_losses
from bevctl.models.layers import ConvBlock
from bevctl.models.query_decoder import QueryDecoderLayer

BRANCHES = {"center": 2, "height": 1, "dim": 3, "rot": 2, "vel": 2}
"""Regression branches in the order of the box code, and their channels."""
BRANCH_CHANNELS = 64
PRIOR_BIAS = -2.19
"""Logit of about 0.1: a new head starts by seeing almost nothing, as almost every cell and query is background."""
CENTER_MARGIN = 7.2
"""Predicted centres may lie this far, m, outside the grid."""
Z_LIMIT = 10.0


@dataclass(frozen=True)
class ObjectOutputs:
    """What the head says about a batch, float32."""

    heatmap: Tensor
    """(B, K, X, Y) logits of an object of class k centred in the cell."""
    query_labels: Tensor
    """(B, Q) int64 class whose heatmap gave the query."""
    query_scores: Tensor
    """(B, Q, K) probabilities of the heatmap's local maxima at the query's cell."""
    logits: Tensor
    """(B, Q, K) classes."""
    codes: Tensor
    """(B, Q, 10) boxes, see `box_coder`."""


class TransFusionHead(nn.Module):
    """Heatmap, queries at its peaks, one decoder layer, a box and class for each query.

    `grid` gives the cells of the input map; classes in `single_cell` (indices; objects as small as a cell) may have
    peaks side by side. Raises BevctlError for more queries than the heatmaps have cells.
    """

    code_weights: Tensor

    def __init__(
        self, config: ObjectHeadConfig, channels_in: int, classes: int, grid: BevGrid, single_cell: tuple[int, ...]
    ) -> None:
        super().__init__()
        if config.proposals > classes * grid.shape[0] * grid.shape[1]:
            raise BevctlError(
                f"model.object.proposals is {config.proposals}, more than {classes} heatmaps of {grid.shape} cells.",
                "Lower model.object.proposals.",
            )
        self.config, self.classes, self.grid, self.single_cell = config, classes, grid, single_cell
        hidden = config.hidden
        self.class_encoding = nn.Conv1d(classes, hidden, 1)
        self.shared_conv = nn.Conv2d(channels_in, hidden, 3, padding=1)
        self.heatmap_head = nn.Sequential(ConvBlock(hidden, hidden, 3), nn.Conv2d(hidden, classes, 3, padding=1))
        self.decoder = nn.ModuleList([QueryDecoderLayer(hidden, config.attention_heads, config.ffn, config.dropout)])
        self.prediction_heads = nn.ModuleList(
            [nn.ModuleDict({name: _branch(hidden, width) for name, width in (BRANCHES | {"heatmap": classes}).items()})]
        )
        self.register_buffer("code_weights", torch.tensor(CODE_WEIGHTS), persistent=False)
        self._init_classifiers()

    def _init_classifiers(self) -> None:
        """The prior on both classifiers, which upstream's code defines but never sets; loading weights replaces it."""
        for name in ("heatmap_head.1", "prediction_heads.0.heatmap.1"):
            nn.init.normal_(self.get_parameter(f"{name}.weight"), std=0.01)
            nn.init.constant_(self.get_parameter(f"{name}.bias"), PRIOR_BIAS)

    def forward(self, bev: Tensor) -> ObjectOutputs:
        """(B, C, X, Y) map → the head's outputs."""
        feature = self.shared_conv(bev)
        heatmap = self.heatmap_head(feature).float()
        peaks = self._local_maxima(heatmap.detach().sigmoid())
        best = peaks.flatten(1).topk(self.config.proposals).indices
        cells = bev.shape[2] * bev.shape[3]
        label, cell = best // cells, best % cells
        flat = feature.flatten(2).transpose(1, 2)
        query = _take(flat, cell) + self._encode_class(label)
        position = torch.stack([cell // bev.shape[3], cell % bev.shape[3]], dim=-1) + 0.5
        query = self.decoder[0](query, position, flat, self._cell_centres(bev))
        branches = {name: branch(query.transpose(1, 2)) for name, branch in self.prediction_heads[0].named_children()}
        codes = torch.cat([branches[name].float() for name in BRANCHES], dim=1).transpose(1, 2)
        return ObjectOutputs(
            heatmap=heatmap,
            query_labels=label,
            query_scores=_take(peaks.flatten(2).transpose(1, 2), cell),
            logits=branches["heatmap"].float().transpose(1, 2),
            codes=torch.cat([codes[..., :2] + position, codes[..., 2:]], dim=-1),
        )

    def _local_maxima(self, scores: Tensor) -> Tensor:
        """(B, K, X, Y) scores with all but local maxima set to 0; the border has no full window and holds none."""
        kernel = self.config.nms_kernel
        largest = F.pad(F.max_pool2d(scores, kernel, stride=1), [kernel // 2] * 4)
        is_peak = scores == largest
        for index in self.single_cell:
            is_peak[:, index] = True
        return scores * is_peak

    def _encode_class(self, label: Tensor) -> Tensor:
        """(B, Q) labels → (B, Q, C)."""
        one_hot = F.one_hot(label, self.classes).transpose(1, 2).to(self.class_encoding.weight.dtype)
        encoded: Tensor = self.class_encoding(one_hot)
        return encoded.transpose(1, 2)

    @staticmethod
    def _cell_centres(bev: Tensor) -> Tensor:
        """(1, X · Y, 2) centres of all cells in cells, x-major."""
        x, y = (torch.arange(size, device=bev.device) + 0.5 for size in bev.shape[2:])
        return torch.stack(torch.meshgrid(x, y, indexing="ij"), dim=-1).view(1, -1, 2)

    def loss(self, outputs: ObjectOutputs, batch: Batch) -> dict[str, Tensor]:
        """Weighted losses and the matched IoU, in float32, under the names that mit-bevfusion logs.

        Samples without annotations weigh nothing, but their outputs stay part of the graph.
        """
        config = self.config
        if config.box_z == "top":
            batch = dataclasses.replace(batch, boxes=[_raised(boxes, 0.5) for boxes in batch.boxes])
        with torch.autocast(outputs.codes.device.type, enabled=False):
            losses = detection_losses(
                outputs.heatmap, outputs.logits, outputs.codes, batch, self.grid, self.code_weights
            )
            return {
                "loss/object/loss_heatmap": config.loss_weight * config.heatmap_weight * losses.heatmap,
                "loss/object/layer_-1_loss_cls": config.loss_weight * config.class_weight * losses.classes,
                "loss/object/layer_-1_loss_bbox": config.loss_weight * config.box_weight * losses.boxes,
                "stats/object/matched_ious": losses.mean_iou,
            }

    @torch.no_grad()
    def predict(self, outputs: ObjectOutputs) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Boxes B × (n_i, 9), scores and labels, best first.

        A query's score is its probability of the class that it came from times the heatmap's at its cell. There is no
        suppression: queries are already peaks. Boxes centred too far outside the grid are left out.
        """
        boxes = decode(outputs.codes, self.grid)
        if self.config.box_z == "top":
            boxes = _raised(boxes, -0.5)
        scores = (outputs.logits.sigmoid() * outputs.query_scores).gather(2, outputs.query_labels[..., None])[..., 0]
        scores, order = scores.sort(dim=1, descending=True)
        boxes, labels = _take(boxes, order), outputs.query_labels.gather(1, order)
        lower = boxes.new_tensor([*(bound - CENTER_MARGIN for bound in self.grid.lower), -Z_LIMIT])
        upper = boxes.new_tensor([*(bound + CENTER_MARGIN for bound in self.grid.upper), Z_LIMIT])
        kept = ((boxes[..., :3] >= lower) & (boxes[..., :3] <= upper)).all(-1)
        return (
            [b[k] for b, k in zip(boxes, kept, strict=True)],
            [s[k] for s, k in zip(scores, kept, strict=True)],
            [c[k] for c, k in zip(labels, kept, strict=True)],
        )


def _branch(channels_in: int, channels: int) -> nn.Sequential:
    return nn.Sequential(ConvBlock(channels_in, BRANCH_CHANNELS, 1, dims=1), nn.Conv1d(BRANCH_CHANNELS, channels, 1))


def _raised(boxes: Tensor, heights: float) -> Tensor:
    """(..., 9) boxes moved up by a multiple of their own height."""
    z = boxes[..., 2:3] + heights * boxes[..., 5:6]
    return torch.cat([boxes[..., :2], z, boxes[..., 3:]], dim=-1)


def _take(values: Tensor, index: Tensor) -> Tensor:
    """(B, L, C) rows at (B, Q) → (B, Q, C)."""
    return values.gather(1, index[..., None].expand(-1, -1, values.shape[2]))
