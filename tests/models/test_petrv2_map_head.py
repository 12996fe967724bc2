"""The map head: queries on a grid, decoders that double it three times, losses of every layer."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from bevctl.batch import Batch
from bevctl.config.schema import MapHeadConfig, PetrConfig
from bevctl.models.map_loss import map_losses
from bevctl.models.petrv2_map_head import Doubling, LaneDecoder, PetrMapHead
from bevctl.models.petrv2_position import sine_embedding
from bevctl.models.petrv2_transformer import ImageMemory
from tests.models.nano_petrv2 import MAP_CLASSES, nano_petrv2_batch, nano_petrv2_config

PETR = PetrConfig(hidden=16, layers=2, attention_heads=2, ffn=16, dropout=0.0, map_queries=(2, 3))
CONFIG = MapHeadConfig(
    xbound=(-8.0, 8.0, 1.0), ybound=(-12.0, 12.0, 1.0), focal_alpha=0.5, class_weights=(2.0, 4.0, 8.0)
)


@pytest.fixture
def head() -> PetrMapHead:
    torch.manual_seed(0)
    return PetrMapHead(CONFIG, PETR, MAP_CLASSES)


def seen(batch: int = 2) -> ImageMemory:
    return ImageMemory(torch.randn(batch, 30, 16), torch.randn(batch, 30, 16), None, None)


def batch_with(masks: Tensor, has_map: tuple[bool, ...] = (True, True)) -> Batch:
    batch = nano_petrv2_batch(nano_petrv2_config())
    return dataclasses.replace(batch, bev_map=masks, has_map=torch.tensor(has_map))


def test_doubling_is_bilinear_between_outer_cells_beside_the_nearest_start() -> None:
    torch.manual_seed(0)
    stage = Doubling(4, 6, 3, 5).double()
    x, start = torch.randn(2, 4, 4, 6).double(), torch.randn(2, 5, 2, 3).double()
    stretched = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True)
    hidden = F.relu(F.conv2d(stretched, stage.get_parameter("conv.1.weight"), padding=1))
    up = F.conv2d(start, stage.get_parameter("up.weight"), stage.get_parameter("up.bias"))
    beside = F.interpolate(up, size=(8, 12), mode="nearest")
    expected = F.relu(F.conv2d(hidden, stage.get_parameter("conv.3.weight")) + beside)
    torch.testing.assert_close(stage(x, start), expected)


def test_one_decoder_has_as_many_parameters_as_upstreams() -> None:
    assert sum(p.numel() for p in LaneDecoder(256).parameters()) == 1_123_073


def test_a_query_becomes_eight_by_eight_cells_of_each_class_after_each_layer(head: PetrMapHead) -> None:
    assert head(seen()).shape == (2, 2, 3, 16, 24)


def test_samples_do_not_see_each_other(head: PetrMapHead) -> None:
    memory = seen()
    both = head(memory)
    for sample in range(2):
        keys, values = memory.keys[sample : sample + 1], memory.values[sample : sample + 1]
        alone = head(ImageMemory(keys, values, None, None))
        torch.testing.assert_close(both[:, sample : sample + 1], alone, rtol=1e-4, atol=1e-5)


def test_queries_stand_at_the_centres_of_a_grid_whose_first_axis_is_x(head: PetrMapHead) -> None:
    places = [[0.25, 1 / 6], [0.25, 0.5], [0.25, 5 / 6], [0.75, 1 / 6]]
    torch.testing.assert_close(head.places[:4], torch.tensor(places))
    inputs: list[Tensor] = []
    head.query_embedding.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    head(seen())
    y, x = (sine_embedding(torch.tensor(2 * math.pi * place), 8) for place in (5 / 6, 0.25))
    torch.testing.assert_close(inputs[0][2], torch.cat([y, x]))


def test_maps_are_turned_by_half_a_circle_against_petrs(head: PetrMapHead) -> None:
    """Its data have what stands at the greatest x and y in the first cell, and so have its queries and decoders."""
    theirs: list[Tensor] = []
    head.lane_branches["divider"].register_forward_hook(lambda _, __, out: theirs.append(out))
    ours = head(seen(1))[:, 0, 1]
    assert torch.equal(ours, torch.rot90(theirs[0], 2, (1, 2)))
    assert not torch.allclose(ours, theirs[0])


def test_losses_of_all_layers_by_hand(head: PetrMapHead) -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 2, 3, 16, 24)
    masks = (torch.rand(2, 3, 16, 24) < 0.3).float()
    losses = head.loss(logits, batch_with(masks))
    assert list(losses) == ["loss/map/layer_0/focal", *(f"loss/map/{name}/focal" for name in MAP_CLASSES)]
    p, mask = logits.double().sigmoid(), masks > 0
    pixels = torch.where(mask, -0.5 * (1 - p) ** 2 * p.log(), -0.5 * p**2 * (1 - p).log())
    expected = pixels.mean((1, 3, 4)) * torch.tensor([2.0, 4.0, 8.0])
    found = torch.stack(list(losses.values())).double()
    torch.testing.assert_close(found, torch.stack([expected[0].sum(), *expected[1]]), rtol=1e-5, atol=0)


def test_a_sample_without_a_map_weighs_nothing(head: PetrMapHead) -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 2, 3, 16, 24, requires_grad=True)
    masks = (torch.rand(2, 3, 16, 24) < 0.3).float()
    one = head.loss(logits, batch_with(masks, (True, False)))
    alone = map_losses(logits[:, :1], batch_with(masks[:1], (True,)), CONFIG)
    torch.testing.assert_close(torch.stack(list(one.values())), torch.stack([alone[0].sum(), *alone[1]]))
    torch.stack(list(one.values())).sum().backward()
    assert logits.grad is not None
    assert not logits.grad[:, 1].any()
    none = head.loss(logits, dataclasses.replace(batch_with(masks, (False, False)), bev_map=None))
    assert all(value == 0 for value in none.values())


def test_predictions_are_those_of_the_last_layer(head: PetrMapHead) -> None:
    logits = torch.randn(2, 2, 3, 16, 24)
    torch.testing.assert_close(head.predict(logits), logits[1].sigmoid())


def test_recomputed_decoders_give_the_same_gradients() -> None:
    memory = seen()
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        head = PetrMapHead(CONFIG, PETR, MAP_CLASSES, checkpointing).train()
        head(memory).square().mean().backward()
        gradients.append([p.grad for p in head.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed)
