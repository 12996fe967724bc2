"""The detection head: boxes, scores, targets and losses against plain computations."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from bevctl.batch import Batch
from bevctl.config.schema import ObjectHeadConfig, PetrConfig
from bevctl.models import petrv2_head, petrv2_loss
from bevctl.models.petrv2_coder import decode, encode
from bevctl.models.petrv2_head import PetrObjectHead, PetrOutputs
from bevctl.models.petrv2_loss import detection_losses
from bevctl.models.petrv2_transformer import ImageMemory
from tests.models.nano_petrv2 import nano_petrv2_batch, nano_petrv2_config

CLASSES, BOUNDS = 10, (-8.0, -8.0, -5.0, 8.0, 8.0, 3.0)
PETR = PetrConfig(hidden=16, layers=2, attention_heads=2, ffn=16, predictions=20)


@pytest.fixture
def head() -> PetrObjectHead:
    torch.manual_seed(0)
    return PetrObjectHead(ObjectHeadConfig(proposals=12, class_weight=2.0), PETR, CLASSES, BOUNDS).eval()


def batch_of(counts: tuple[int, ...] = (3, 3)) -> Batch:
    batch = nano_petrv2_batch(nano_petrv2_config(), len(counts))
    return dataclasses.replace(
        batch,
        boxes=[boxes[:count] for boxes, count in zip(batch.boxes, counts, strict=True)],
        labels=[labels[:count] for labels, count in zip(batch.labels, counts, strict=True)],
    )


def seen(interval: Tensor | None = None) -> ImageMemory:
    return ImageMemory(torch.randn(2, 30, 16), torch.randn(2, 30, 16), None, interval)


def outputs_for(batch: Batch, layers: int = 2, queries: int = 12) -> PetrOutputs:
    """Queries that are right about every object, the last ones seeing nothing."""
    logits = torch.full((layers, batch.size, queries, CLASSES), -12.0)
    codes = torch.zeros(layers, batch.size, queries, 10)
    for sample, (boxes, labels) in enumerate(zip(batch.boxes, batch.labels, strict=True)):
        codes[:, sample, : len(boxes)] = encode(boxes).nan_to_num(0.0)
        logits[:, sample, torch.arange(len(boxes)), labels] = 12.0
    return PetrOutputs(logits, codes)


def test_codes_by_hand() -> None:
    box = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 0.5, 7.0, 8.0])  # x, y, z, l, w, h, yaw, vx, vy
    expected = [1, 2, math.log(5), math.log(4), 3, math.log(6), math.sin(0.5), math.cos(0.5), 7, 8]
    torch.testing.assert_close(encode(box), torch.tensor(expected))


@given(st.integers(0, 2**16))
def test_decoding_undoes_encoding(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    boxes = torch.randn(4, 9, generator=generator, dtype=torch.float64)
    boxes[:, 3:6] = boxes[:, 3:6].abs() + 0.1
    boxes[:, 6] = boxes[:, 6].clamp(-math.pi + 1e-6, math.pi)
    torch.testing.assert_close(decode(encode(boxes)), boxes)


def test_centres_lie_beside_reference_points_and_velocities_are_per_second(head: PetrObjectHead) -> None:
    raw = torch.randn(2, 2, 12, 10)
    interval = torch.tensor([0.5, 2.0])
    codes = head._placed(raw, interval)
    low, high = torch.tensor(BOUNDS, dtype=torch.float64).view(2, 3)
    reference = head.reference_points.weight.detach().double()
    logit = (reference / (1 - reference)).log()
    offset = raw[..., [0, 1, 4]].double()
    expected = low + (high - low) / (1 + torch.exp(-(offset + logit)))
    torch.testing.assert_close(codes[..., [0, 1, 4]].double(), expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(codes[..., 8:], raw[..., 8:] / interval.view(1, 2, 1, 1))
    for slot in (2, 3, 5, 6, 7):
        assert torch.equal(codes[..., slot], raw[..., slot])
    assert torch.equal(head._placed(raw, None)[..., 8:], raw[..., 8:])


def test_a_new_head_sees_almost_nothing(head: PetrObjectHead) -> None:
    outputs = head(seen())
    assert outputs.logits.shape == (2, 2, 12, CLASSES)
    assert outputs.codes.shape == (2, 2, 12, 10)
    for branch in head.cls_branches:
        assert branch.get_parameter("6.bias").sigmoid().tolist() == pytest.approx([0.01] * CLASSES)


@pytest.mark.parametrize("half", [False, True])
def test_branches_at_once_are_branches_one_by_one(half: bool) -> None:
    torch.manual_seed(0)
    dtype = torch.float32 if half else torch.float64
    head = PetrObjectHead(ObjectHeadConfig(proposals=12), PETR, CLASSES, BOUNDS).to(dtype)
    queries = torch.randn(2, 3, 12, 16, dtype=dtype)
    branches = [*head.cls_branches.parameters(), *head.reg_branches.parameters()]
    runs = []
    for compute in (head._branches_at_once, head._branches):
        x = queries.clone().requires_grad_()
        with torch.autocast("cpu", torch.float16, enabled=half):
            logits, codes = compute(x)
        assert logits.dtype == codes.dtype == torch.float32
        runs.append([logits, codes, *torch.autograd.grad((logits.tanh() * codes).sum(), [x, *branches])])
    assert all(found.is_contiguous() for found in runs[0][3:])
    bound = 2e-2 if half else 1e-5
    for found, expected in zip(*runs, strict=True):
        torch.testing.assert_close(found, expected, rtol=bound, atol=bound / 10)


def test_a_branch_that_is_listened_to_runs_by_itself(head: PetrObjectHead, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(petrv2_head, "use_triton", lambda _: True)
    calls: list[object] = []
    monkeypatch.setattr(head, "_branches_at_once", lambda _: "at once")
    assert head._branches(torch.randn(2, 3, 12, 16)) == "at once"
    head.reg_branches[1].get_submodule("task_heads.2").register_forward_hook(lambda *_: calls.append("alone"))
    logits, _ = head._branches(torch.randn(2, 3, 12, 16))
    assert calls == ["alone"]
    assert logits.shape == (2, 3, 12, CLASSES)


def reference_losses(logits: Tensor, codes: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """One query and one object at a time, in float64; all samples annotated."""
    positives = sum(min(len(boxes), logits.shape[2]) for boxes in batch.boxes)
    totals = torch.zeros(2, len(logits), dtype=torch.float64)
    for layer in range(len(logits)):
        for sample, (boxes, labels) in enumerate(zip(batch.boxes, batch.labels, strict=True)):
            targets = encode(boxes.double())
            p = logits[layer, sample].double().sigmoid()
            box = codes[layer, sample].double()
            cost = torch.zeros(len(p), len(boxes), dtype=torch.float64)
            for m, label in enumerate(labels.tolist()):
                positive = -0.25 * (1 - p[:, label]) ** 2 * p[:, label].log()
                negative = -0.75 * p[:, label] ** 2 * (1 - p[:, label]).log()
                cost[:, m] = 2.0 * (positive - negative) + 0.25 * (box[:, :8] - targets[m, :8]).abs().sum(-1)
            one_hot = torch.zeros_like(p)
            for query, m in zip(*linear_sum_assignment(cost.numpy()), strict=True):
                one_hot[query, labels[m]] = 1
                known = ~targets[m].isnan()
                totals[1, layer] += (box[query] - targets[m])[known].abs().sum()
            focal = torch.where(one_hot > 0, -0.25 * (1 - p) ** 2 * p.log(), -0.75 * p**2 * (1 - p).log())
            totals[0, layer] += focal.sum()
    return totals[0] / max(positives, 1), totals[1] / max(positives, 1)


@pytest.mark.parametrize("counts", [(3, 3), (3, 0), (0, 0), (1, 2)])
def test_losses_are_those_of_plain_float64(counts: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    batch = batch_of(counts)
    logits, codes = torch.randn(3, 2, 12, CLASSES), 2 * torch.randn(3, 2, 12, 10)
    found = detection_losses(logits, codes, batch)
    for ours, expected in zip(found, reference_losses(logits, codes, batch), strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-6)


def test_ranks_together_have_the_loss_of_one_with_all_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean over ranks, which is what their mean gradient belongs to, whatever each has to see."""
    torch.manual_seed(0)
    batch = batch_of((3, 1))
    logits, codes = torch.randn(2, 2, 12, CLASSES), torch.randn(2, 2, 12, 10)
    expected = torch.stack(detection_losses(logits, codes, batch))
    monkeypatch.setattr(petrv2_loss, "mean_over_ranks", lambda *_: 2.0)
    ranks = []
    for rank in range(2):
        own = dataclasses.replace(
            batch, boxes=[batch.boxes[rank]], labels=[batch.labels[rank]], has_boxes=batch.has_boxes[rank : rank + 1]
        )
        ranks.append(torch.stack(detection_losses(logits[:, rank : rank + 1], codes[:, rank : rank + 1], own)))
    torch.testing.assert_close(torch.stack(ranks).mean(0), expected)


def test_more_objects_than_queries() -> None:
    torch.manual_seed(0)
    batch = batch_of()
    logits, codes = torch.randn(1, 2, 2, CLASSES), torch.randn(1, 2, 2, 10)
    for ours, expected in zip(
        detection_losses(logits, codes, batch), reference_losses(logits, codes, batch), strict=True
    ):
        torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-6)


def test_gradients_of_the_losses() -> None:
    torch.manual_seed(0)
    batch = batch_of((2, 1))
    logits, codes = torch.randn(1, 2, 3, CLASSES), torch.randn(1, 2, 3, 10)
    leaves = [logits.clone().requires_grad_(), codes.clone().requires_grad_()]
    (2 * torch.stack(detection_losses(leaves[0], leaves[1], batch))).sum().backward()
    step = 1e-6
    for leaf, values in zip(leaves, (logits, codes), strict=True):
        for index in ((0, 0, 0, 1), (0, 1, 2, 4), (0, 0, 1, 9)):
            shifted = []
            for sign in (1, -1):
                changed = values.double()
                changed[index] += sign * step
                pair = (changed, codes) if values is logits else (logits, changed)
                shifted.append(sum(float(loss.sum()) for loss in reference_losses(*pair, batch)))
            assert leaf.grad is not None
            assert leaf.grad[index].item() == pytest.approx((shifted[0] - shifted[1]) / step, abs=1e-4)


def test_perfect_queries_cost_almost_nothing(head: PetrObjectHead) -> None:
    losses = head.loss(outputs_for(batch_of()), batch_of())
    assert set(losses) == {f"loss/object/layer_{layer}_loss_{kind}" for layer in (0, -1) for kind in ("cls", "bbox")}
    assert all(value < 1e-3 for value in losses.values())


def test_each_layer_is_matched_for_itself() -> None:
    batch, outputs = batch_of(), outputs_for(batch_of())
    logits, codes = outputs.logits.clone(), outputs.codes.clone()
    logits[1], codes[1] = logits[1].flip(1), codes[1].flip(1)  # other queries are right after the second layer
    assert all(float(loss.max()) < 1e-3 for loss in detection_losses(logits, codes, batch))


def test_an_unknown_velocity_is_left_out() -> None:
    batch, outputs = batch_of(), outputs_for(batch_of())
    assert batch.boxes[0][0, 7:].isnan().all()
    codes = outputs.codes.clone()
    codes[:, 0, 0, 8:] = 50.0
    _, boxes = detection_losses(outputs.logits, codes, batch)
    assert float(boxes.max()) < 1e-5


def test_a_sample_without_annotations_weighs_nothing_but_stays_in_the_graph() -> None:
    torch.manual_seed(0)
    batch = dataclasses.replace(batch_of((3, 0)), has_boxes=torch.tensor([True, False]))
    logits = torch.randn(2, 2, 12, CLASSES, requires_grad=True)
    codes = torch.randn(2, 2, 12, 10, requires_grad=True)
    torch.stack(detection_losses(logits, codes, batch)).sum().backward()
    assert logits.grad is not None
    assert codes.grad is not None
    assert not logits.grad[:, 1].any()
    assert not codes.grad[:, 1].any()
    assert logits.grad[:, 0].any()


def test_broken_outputs_show_in_the_loss_and_raise_nothing() -> None:
    outputs = outputs_for(batch_of())
    codes = outputs.codes.clone()
    codes[0, 0, 0] = torch.nan
    codes[1, 1, 2, 0] = torch.inf
    classes, boxes = detection_losses(outputs.logits, codes, batch_of())
    assert classes.isfinite().all()
    assert not boxes.isfinite().all()


def test_predictions_are_the_best_pairs_of_query_and_class(head: PetrObjectHead) -> None:
    torch.manual_seed(0)
    batch = batch_of()
    codes = encode(batch.boxes[0].nan_to_num(0.0)).repeat(1, 2, 4, 1)
    outputs = PetrOutputs(torch.randn(1, 2, 12, CLASSES), codes)
    boxes, scores, labels = head.predict(outputs)
    expected = sorted(outputs.logits[0, 0].sigmoid().flatten().tolist(), reverse=True)[:20]
    assert scores[0].tolist() == pytest.approx(expected)
    first = int(outputs.logits[0, 0].argmax())
    assert labels[0][0] == first % CLASSES
    torch.testing.assert_close(boxes[0][0, :7], batch.boxes[0][first // CLASSES % 3, :7])


def test_centres_out_of_reach_are_left_out(head: PetrObjectHead) -> None:
    outputs = outputs_for(batch_of())
    codes = outputs.codes.clone()
    codes[-1, 0, 0, 0], codes[-1, 0, 1, 4] = 61.3, -10.1
    boxes, scores, _ = head.predict(PetrOutputs(outputs.logits, codes))
    assert int((scores[0] > 0.5).sum()) == 1
    assert int((scores[1] > 0.5).sum()) == 3
    assert len(boxes[0]) == len(scores[0])


def test_weights_of_task_class_and_box(head: PetrObjectHead) -> None:
    torch.manual_seed(0)
    outputs, batch = PetrOutputs(torch.randn(2, 2, 12, CLASSES), torch.randn(2, 2, 12, 10)), batch_of()
    classes, boxes = detection_losses(outputs.logits, outputs.codes, batch)
    head.config = ObjectHeadConfig(loss_weight=3.0, class_weight=2.0, box_weight=0.25)
    losses = head.loss(outputs, batch)
    torch.testing.assert_close(losses["loss/object/layer_0_loss_cls"], 6 * classes[0])
    torch.testing.assert_close(losses["loss/object/layer_-1_loss_bbox"], 0.75 * boxes[1])
