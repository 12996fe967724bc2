from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from bevctl.batch import Batch
from bevctl.config.schema import MapHeadConfig
from bevctl.models.box_coder import BevGrid
from bevctl.models.map_head import MapHead
from tests.models.nano import nano_batch, nano_config

GRID = BevGrid(lower=(-8.0, -8.0), cell=(2.0, 1.0), shape=(8, 16))
CONFIG = MapHeadConfig(xbound=(-6.0, 6.0, 1.0), ybound=(-5.0, 5.0, 0.5))


def batch_with(bev_map: Tensor | None, has_map: list[bool]) -> Batch:
    template = nano_batch(nano_config(**{"model.map": None}), batch=len(has_map))
    return dataclasses.replace(template, bev_map=bev_map, has_map=torch.tensor(has_map))


def resampled(bev: Tensor) -> Tensor:
    head = MapHead(CONFIG, bev.shape[1], ("road",), GRID)
    head.classifier = nn.Sequential(nn.Identity())
    out: Tensor = head(bev)
    return out


def test_each_output_cell_reads_the_map_at_its_centre() -> None:
    x = GRID.lower[0] + GRID.cell[0] * (torch.arange(8) + 0.5)
    y = GRID.lower[1] + GRID.cell[1] * (torch.arange(16) + 0.5)
    places = torch.stack([x[:, None].expand(8, 16), y[None].expand(8, 16)])[None]
    out = resampled(places)
    assert out.shape == (1, 2, 12, 20)
    torch.testing.assert_close(out[0, 0, :, 3], -6 + torch.arange(12) + 0.5)
    torch.testing.assert_close(out[0, 1, 5], -5 + 0.5 * (torch.arange(20) + 0.5))


def test_beyond_the_map_there_is_zero() -> None:
    head = MapHead(MapHeadConfig(xbound=(-12.0, 12.0, 1.0), ybound=(-5.0, 5.0, 1.0)), 1, ("road",), GRID)
    head.classifier = nn.Sequential(nn.Identity())
    out = head(torch.ones(1, 1, 8, 16))
    assert not out[0, 0, :3].any()
    assert (out[0, 0, 5:-5] == 1).all()


@pytest.mark.parametrize(("loss", "expected"), [("focal", 0.25 * 0.6931472), ("xent", 0.6931472)])
def test_losses_by_hand(loss: str, expected: float) -> None:
    head = MapHead(dataclasses.replace(CONFIG, loss=loss), 4, ("road", "kerb"), GRID)
    losses = head.loss(torch.zeros(2, 2, 12, 20), batch_with(torch.ones(2, 2, 12, 20), [True, True]))
    assert list(losses) == [f"loss/map/road/{loss}", f"loss/map/kerb/{loss}"]
    assert [float(value) for value in losses.values()] == pytest.approx([expected] * 2, rel=1e-5)


def test_a_sample_without_a_map_weighs_nothing() -> None:
    head = MapHead(CONFIG, 4, ("road",), GRID)
    logits = torch.randn(2, 1, 12, 20, requires_grad=True)
    targets = torch.randint(0, 2, (2, 1, 12, 20)).float()
    masked = head.loss(logits, batch_with(targets, [False, True]))["loss/map/road/focal"]
    alone = head.loss(logits[1:], batch_with(targets[1:], [True]))["loss/map/road/focal"]
    torch.testing.assert_close(masked, alone)
    for bev_map in (targets, None):
        loss = head.loss(logits, batch_with(bev_map, [False, False]))["loss/map/road/focal"]
        (gradient,) = torch.autograd.grad(loss, logits)
        assert float(loss.detach()) == 0
        assert not gradient.any()


def test_probabilities_and_weight() -> None:
    head = MapHead(dataclasses.replace(CONFIG, loss_weight=3.0), 4, ("road",), GRID)
    logits = torch.randn(1, 1, 12, 20)
    truth = batch_with(torch.zeros(1, 1, 12, 20), [True])
    plain = MapHead(CONFIG, 4, ("road",), GRID).loss(logits, truth)
    torch.testing.assert_close(head.loss(logits, truth)["loss/map/road/focal"], 3 * plain["loss/map/road/focal"])
    assert torch.equal(head.predict(logits), logits.sigmoid())


def test_weights_of_classes_and_of_their_pixels() -> None:
    logits = torch.randn(1, 2, 12, 20)
    truth = batch_with(torch.ones(1, 2, 12, 20), [True])
    plain = MapHead(CONFIG, 4, ("road", "kerb"), GRID).loss(logits, truth)
    weighted = dataclasses.replace(CONFIG, class_weights=(2.0, 0.5), focal_alpha=0.25)
    losses = MapHead(weighted, 4, ("road", "kerb"), GRID).loss(logits, truth)
    for name, factor in (("road", 0.5), ("kerb", 0.125)):
        torch.testing.assert_close(losses[f"loss/map/{name}/focal"], factor * plain[f"loss/map/{name}/focal"])


def test_has_the_published_number_of_parameters() -> None:
    with torch.device("meta"):
        head = MapHead(MapHeadConfig(), 512, tuple("abcdef"), BevGrid((-54.0, -54.0), (0.6, 0.6), (180, 180)))
    assert sum(p.numel() for p in head.parameters()) == 4_723_718
