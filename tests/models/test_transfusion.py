from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from bevctl.batch import Batch
from bevctl.config.schema import ObjectHeadConfig
from bevctl.errors import BevctlError
from bevctl.models.box_coder import BevGrid, encode
from bevctl.models.query_decoder import QueryDecoderLayer
from bevctl.models.transfusion import ObjectOutputs, TransFusionHead
from tests.models.nano import nano_batch, nano_config

GRID = BevGrid(lower=(-8.0, -8.0), cell=(2.0, 2.0), shape=(8, 8))
CONFIG = ObjectHeadConfig(proposals=6, hidden=16, attention_heads=2, ffn=32)
CLASSES = 10


@pytest.fixture
def head() -> TransFusionHead:
    torch.manual_seed(0)
    return TransFusionHead(CONFIG, 12, CLASSES, GRID, single_cell=(8, 9)).eval()


def batch_of(boxes: list[Tensor], labels: list[Tensor], has_boxes: list[bool]) -> Batch:
    template = nano_batch(nano_config(**{"model.map": None}), batch=len(boxes))
    return dataclasses.replace(template, boxes=boxes, labels=labels, has_boxes=torch.tensor(has_boxes))


def outputs_at(boxes: Tensor, labels: Tensor, heatmap: float = -5.0) -> ObjectOutputs:
    """Queries that say exactly `boxes` (B, Q, 9) and `labels` (B, Q), on an empty heatmap."""
    confident = torch.nn.functional.one_hot(labels, CLASSES).float()
    return ObjectOutputs(
        heatmap=torch.full((len(boxes), CLASSES, *GRID.shape), heatmap),
        query_labels=labels,
        query_scores=confident,
        logits=20 * confident - 10,
        codes=encode(boxes, GRID),
    )


def box(x: float, y: float) -> Tensor:
    return torch.tensor([x, y, -1.0, 4.0, 2.0, 1.5, 0.3, 1.0, 0.0])


def test_local_maxima_by_hand(head: TransFusionHead) -> None:
    scores = torch.full((1, CLASSES, 8, 8), 0.1)
    scores[0, 0, 3, 3], scores[0, 0, 3, 4], scores[0, 0, 0, 7] = 0.9, 0.8, 0.95
    scores[0, 8, 3, 3], scores[0, 8, 3, 4], scores[0, 8, 0, 7] = 0.9, 0.8, 0.95
    peaks = head._local_maxima(scores)
    assert peaks[0, 0, 3, 3] == pytest.approx(0.9)
    assert peaks[0, 0, 3, 4] == 0, "a neighbour of the peak"
    assert peaks[0, 0, 0, 7] == 0, "the border holds no peak"
    assert torch.equal(peaks[0, 8], scores[0, 8]), "small objects may stand side by side"


def test_queries_start_at_the_best_peaks_of_all_classes(head: TransFusionHead) -> None:
    outputs = head(torch.randn(2, 12, 8, 8))
    peaks = head._local_maxima(outputs.heatmap.sigmoid())
    best = peaks.flatten(1).topk(CONFIG.proposals)
    torch.testing.assert_close(
        outputs.query_scores.gather(2, outputs.query_labels[..., None])[..., 0], best.values, rtol=0, atol=0
    )
    assert torch.equal(outputs.query_labels, best.indices // 64)


def test_centres_are_offsets_from_the_querys_cell(head: TransFusionHead) -> None:
    with torch.no_grad():
        for parameter in head.prediction_heads.parameters():
            parameter.zero_()
    outputs = head(torch.randn(1, 12, 8, 8))
    best = head._local_maxima(outputs.heatmap.sigmoid()).flatten(1).topk(CONFIG.proposals).indices[0] % 64
    expected = torch.stack([best // 8, best % 8], dim=-1) + 0.5
    torch.testing.assert_close(outputs.codes[0, :, :2], expected)


def test_every_cell_is_read_at_its_own_place(head: TransFusionHead) -> None:
    """What the decoder layer gets of a map that is longer in y than in x: each cell's feature, and its centre."""
    seen: list[Tensor] = []
    head.decoder[0].register_forward_pre_hook(lambda _, arguments: seen.extend(arguments))
    bev = torch.randn(1, 12, 6, 9)
    head(bev)
    _, _, cells, centres = seen
    x, y = (centres[0] - 0.5).long().unbind(dim=1)
    assert sorted(zip(x.tolist(), y.tolist(), strict=True)) == [(i, j) for i in range(6) for j in range(9)]
    torch.testing.assert_close(cells[0], head.shared_conv(bev)[0, :, x, y].T)


def test_perfect_predictions_cost_almost_nothing(head: TransFusionHead) -> None:
    boxes, labels = torch.stack([box(1, 1), box(-5, 3)]), torch.tensor([0, 4])
    outputs = outputs_at(boxes[None], labels[None])
    for sample_box, label in zip(boxes, labels, strict=True):
        x, y = GRID.to_cells(sample_box[:2]).long()
        outputs.heatmap[0, label, x, y] = 20
    losses = head.loss(outputs, batch_of([boxes], [labels], [True]))
    assert float(losses["loss/object/layer_-1_loss_bbox"]) == pytest.approx(0, abs=1e-5)
    assert float(losses["loss/object/layer_-1_loss_cls"]) < 1e-3
    assert float(losses["loss/object/loss_heatmap"]) < 0.1
    assert float(losses["stats/object/matched_ious"]) == pytest.approx(1, abs=1e-4)


def test_box_loss_by_hand(head: TransFusionHead) -> None:
    truth = box(1, 1)
    predicted = truth.clone()
    predicted[2] += 0.5
    predicted[7] += 2.0
    outputs = outputs_at(predicted[None, None], torch.tensor([[0]]))
    losses = head.loss(outputs, batch_of([truth[None]], [torch.tensor([0])], [True]))
    assert float(losses["loss/object/layer_-1_loss_bbox"]) == pytest.approx(0.25 * (0.5 + 0.2 * 2.0), rel=1e-5)


def test_unknown_velocity_is_left_out(head: TransFusionHead) -> None:
    truth = box(1, 1)
    truth[7:] = math.nan
    losses = head.loss(
        outputs_at(box(1, 1)[None, None], torch.tensor([[0]])), batch_of([truth[None]], [torch.tensor([0])], [True])
    )
    assert float(losses["loss/object/layer_-1_loss_bbox"]) == pytest.approx(0, abs=1e-5)


def test_a_sample_without_annotations_weighs_nothing_but_stays_in_the_graph(head: TransFusionHead) -> None:
    boxes, labels = box(1, 1)[None], torch.tensor([0])
    nothing = (torch.zeros(0, 9), torch.zeros(0, dtype=torch.int64))
    one = outputs_at(boxes[None], labels[None])
    two = outputs_at(boxes[None].repeat(2, 1, 1), labels[None].repeat(2, 1))
    alone = head.loss(one, batch_of([boxes], [labels], [True]))
    masked = head.loss(two, batch_of([boxes, nothing[0]], [labels, nothing[1]], [True, False]))
    for name, value in alone.items():
        if name.startswith("loss/"):
            torch.testing.assert_close(masked[name], value)
    leaves = [t.requires_grad_() for t in (two.heatmap, two.logits, two.codes)]
    losses = head.loss(two, batch_of([nothing[0]] * 2, [nothing[1]] * 2, [False, False]))
    total = sum(value for name, value in losses.items() if name.startswith("loss/"))
    assert isinstance(total, Tensor)
    total.backward()
    assert float(total.detach()) == 0
    for leaf in leaves:
        assert leaf.grad is not None
        assert not leaf.grad.any()


def test_non_finite_predictions_show_in_the_loss_and_raise_nothing(head: TransFusionHead) -> None:
    outputs = outputs_at(torch.full((1, 3, 9), math.nan), torch.tensor([[0, 1, 2]]))
    losses = head.loss(outputs, batch_of([box(1, 1)[None]], [torch.tensor([0])], [True]))
    assert losses["loss/object/layer_-1_loss_bbox"].isnan()


def test_predictions_are_sorted_scored_and_in_range(head: TransFusionHead) -> None:
    boxes = torch.stack([box(1, 1), box(0, 2), box(40, 0)])
    outputs = outputs_at(boxes[None], torch.tensor([[3, 5, 7]]))
    outputs = dataclasses.replace(outputs, query_scores=outputs.query_scores * torch.tensor([0.5, 0.9, 1.0])[:, None])
    found, scores, labels = head.predict(outputs)
    assert labels[0].tolist() == [5, 3]
    sure = 1 / (1 + math.exp(-10))
    torch.testing.assert_close(scores[0], torch.tensor([0.9, 0.5]) * sure)
    torch.testing.assert_close(found[0], boxes[[1, 0]])


def test_task_and_part_weights(head: TransFusionHead) -> None:
    truth = batch_of([box(1, 1)[None]], [torch.tensor([0])], [True])
    outputs = outputs_at(box(2, 1)[None, None], torch.tensor([[0]]))
    plain = head.loss(outputs, truth)
    head.config = dataclasses.replace(CONFIG, loss_weight=2.0, heatmap_weight=3.0, class_weight=5.0, box_weight=1.0)
    weighted = head.loss(outputs, truth)
    for name, factor in (("loss_heatmap", 6), ("layer_-1_loss_cls", 10), ("layer_-1_loss_bbox", 8)):
        torch.testing.assert_close(weighted[f"loss/object/{name}"], plain[f"loss/object/{name}"] * factor)


def test_a_new_head_sees_almost_nothing(head: TransFusionHead) -> None:
    with torch.no_grad():
        outputs = head(torch.randn(1, 12, 8, 8))
    assert float(outputs.heatmap.sigmoid().mean()) == pytest.approx(0.1, abs=0.03)
    assert float(outputs.logits.sigmoid().mean()) == pytest.approx(0.1, abs=0.03)
    assert float(outputs.codes[..., 3:6].abs().max()) < 3, "sizes start within exp(±3) m"


def test_more_queries_than_cells_are_refused() -> None:
    with pytest.raises(BevctlError, match="proposals is 1000"):
        TransFusionHead(ObjectHeadConfig(proposals=1000), 12, CLASSES, GRID, ())


def attention_by_hand(weights: torch.nn.MultiheadAttention, query: Tensor, memory: Tensor) -> Tensor:
    """Multi-head attention from its packed projection, head by head."""
    w_q, w_k, w_v = weights.in_proj_weight.chunk(3)
    b_q, b_k, b_v = weights.in_proj_bias.chunk(3)
    width = query.shape[-1] // weights.num_heads
    heads = []
    for h in range(weights.num_heads):
        part = slice(h * width, (h + 1) * width)
        q, k, v = ((x @ w.T + b)[..., part] for x, w, b in ((query, w_q, b_q), (memory, w_k, b_k), (memory, w_v, b_v)))
        heads.append((q @ k.transpose(-1, -2) / math.sqrt(width)).softmax(-1) @ v)
    return torch.cat(heads, dim=-1) @ weights.out_proj.weight.T + weights.out_proj.bias


def test_decoder_layer_equals_its_definition() -> None:
    torch.manual_seed(0)
    layer = QueryDecoderLayer(8, 2, 16, 0.1).eval()
    query, position = torch.randn(2, 3, 8), torch.rand(2, 3, 2) * 8
    cells, centres = torch.randn(2, 5, 8), torch.rand(1, 5, 2) * 8
    with torch.no_grad():
        embedded = layer.self_posembed(position)
        x = query + embedded
        x = layer.norm1(query + attention_by_hand(layer.self_attn, x, x))
        memory = cells + layer.cross_posembed(centres)
        x = layer.norm2(x + attention_by_hand(layer.multihead_attn, x + embedded, memory))
        expected = layer.norm3(x + layer.linear2(layer.linear1(x).relu()))
        torch.testing.assert_close(layer(query, position, cells, centres), expected, rtol=1e-5, atol=1e-5)
