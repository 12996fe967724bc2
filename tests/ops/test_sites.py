"""Sites and rules by the map of columns against those by search, tiles, and plans."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bevctl.ops import backend
from bevctl.ops.rulebook import TILE, RuleBook, Triple, ravel, unravel
from bevctl.ops.sites import Room, Sites, Window, plan_sites
from tests.ops.backends import BACKENDS, DEVICES, running

WINDOWS = [
    Window((3, 3, 3), (2, 2, 2), (1, 1, 1)),
    Window((3, 3, 3), (2, 2, 2), (1, 1, 0)),
    Window((1, 1, 3), (1, 1, 2), (0, 0, 0)),
    Window((2, 1, 3), (2, 1, 1), (0, 0, 2)),
]


def random_coords(seed: int, count: int, shape: Triple, batch: int) -> Tensor:
    """Ascending sites."""
    generator = torch.Generator().manual_seed(seed)
    cells = batch * shape[0] * shape[1] * shape[2]
    return unravel(torch.randperm(cells, generator=generator)[:count].sort().values, shape)


@given(
    seed=st.integers(0, 10_000),
    count=st.integers(0, 80),
    shape=st.tuples(st.integers(3, 7), st.integers(3, 7), st.integers(3, 9)),
    batch=st.integers(1, 3),
    window=st.sampled_from(WINDOWS),
)
@settings(max_examples=12)
def test_both_backends_make_the_same_rules(seed: int, count: int, shape: Triple, batch: int, window: Window) -> None:
    coords = random_coords(seed, count, shape, batch)
    rules = []
    for name in BACKENDS:
        with running(name, "cpu"):
            sites = Sites(coords, shape, batch)
            outputs, strided = sites.strided_rules(window)
            submanifold = sites.submanifold_rules((3, 3, 3))
            rules.append((outputs.coords, strided.table, strided.transposed().table, submanifold.table))
            assert outputs.shape == strided_shape(shape, window)
    for by_search, by_map in zip(*rules, strict=True):
        assert torch.equal(by_search, by_map)


def strided_shape(shape: Triple, window: Window) -> tuple[int, ...]:
    return tuple((n + 2 * p - k) // s + 1 for n, k, s, p in zip(shape, *window, strict=True))


@pytest.mark.parametrize("tiled", [False, True])
def test_transposed_rules_are_the_pairs_the_other_way(tiled: bool) -> None:
    coords = random_coords(0, 40, (5, 6, 7), 2)
    _, rules = Sites(coords, (5, 6, 7), 2).strided_rules(WINDOWS[0])
    with running("triton", "cpu"):
        assert not tiled or len(rules.tiles.order)
        transposed = rules.transposed()
    pairs = {(i, o, k) for o, row in enumerate(rules.table.tolist()) for k, i in enumerate(row) if i < rules.inputs}
    other = {
        (i, o, k) for i, row in enumerate(transposed.table.tolist()) for k, o in enumerate(row) if o < transposed.inputs
    }
    assert pairs == other
    assert pairs


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [1, 100, 400])
def test_tiles_hold_every_rule_once(count: int, device: str) -> None:
    coords = random_coords(1, count, (9, 8, 7), 1).to(device)
    with running("triton", device):
        rules = Sites(coords, (9, 8, 7), 1).submanifold_rules((3, 3, 3))
        table = rules.table.cpu()
        tiles = rules.tiles
    assert torch.equal(rules.table.cpu(), table)
    order = tiles.order.long().cpu()
    places = -(-count // TILE) * TILE
    assert torch.equal(order.sort().values, torch.arange(count))
    assert tiles.table.shape == (27, places)
    assert torch.equal(tiles.table[:, :count].T.cpu(), table[order])
    assert (tiles.table[:, count:] == rules.inputs).all()
    needed = (tiles.table < rules.inputs).view(27, -1, TILE).any(dim=2).cpu()
    for tile, offsets in enumerate(needed.T):
        listed = tiles.offsets[tile, : tiles.offset_counts[tile]]
        assert listed.tolist() == offsets.nonzero().flatten().tolist()
    for offset, used in enumerate(needed):
        assert tiles.tiles[offset, : tiles.tile_counts[offset]].tolist() == used.nonzero().flatten().tolist()


def test_rows_that_meet_the_same_offsets_share_tiles() -> None:
    # Rows with and without a neighbour take turns: sorted, a tile needs one offset or none.
    table = torch.full((2 * TILE, 1), 2 * TILE, dtype=torch.int32)
    table[::2, 0] = 5
    with running("triton", "cpu"):
        tiles = RuleBook(table, 2 * TILE, mirrored=False).tiles
    assert tiles.offset_counts.tolist() == [0, 1]
    assert tiles.order.tolist() == [*range(1, 2 * TILE, 2), *range(0, 2 * TILE, 2)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("count", [0, 1, 60])
def test_a_plan_leaves_padding_out_and_follows_the_windows(name: str, device: str, count: int) -> None:
    shape, windows = (12, 9, 15), [WINDOWS[0], WINDOWS[1], WINDOWS[2]]
    coords = random_coords(2, count, shape, 2)
    padded = torch.cat([coords, torch.full((5, 4), -1)]).to(device)
    with running(name, device):
        planned = plan_sites(padded, shape, 2, windows)
        assert torch.equal(planned.coords.cpu(), coords)
        level, expected = planned, Sites(coords, shape, 2)
        for window in windows:
            level, rules = level.strided_rules(window)
            with backend.forced("torch"):
                expected, expected_rules = expected.strided_rules(window)
            assert torch.equal(level.coords.cpu(), expected.coords)
            assert torch.equal(rules.table.cpu(), expected_rules.table)


@pytest.mark.parametrize("device", DEVICES)
def test_padding_meets_nothing(device: str) -> None:
    shape, room = (12, 9, 15), Room()
    coords = random_coords(2, 60, shape, 2).to(device)
    room.rows = [130, 200]
    with running("triton", device):
        exact = plan_sites(coords, shape, 2, WINDOWS[:1])
        padded = plan_sites(coords, shape, 2, WINDOWS[:1], room)
        for sites in (exact, padded):
            assert sites.count is not None
            assert sites.count.item() == 60
        (fewer, rules), (more, padded_rules) = exact.strided_rules(WINDOWS[0]), padded.strided_rules(WINDOWS[0])
        submanifold = padded.submanifold_rules((3, 3, 3)).table
    assert (len(padded), len(more)) == (130, 200)
    assert torch.equal(more.coords[: len(fewer)], fewer.coords)
    assert (more.coords[len(fewer) :] == -1).all()
    table = padded_rules.table[: len(fewer)]
    assert torch.equal(torch.where(table == 130, 60, table), rules.table)
    assert (padded_rules.table[len(fewer) :] == 130).all()
    assert (submanifold[60:] == 130).all()
    assert ((submanifold < 60) | (submanifold == 130)).all()


@pytest.mark.parametrize(("shape", "batch"), [((4, 4, 100), 1), ((10**6, 10**6, 10), 2)])
def test_grids_without_a_map_are_searched(shape: Triple, batch: int) -> None:
    corner = torch.tensor([[batch - 1, shape[0] - 1, shape[1] - 1, z] for z in range(shape[2] - 2, shape[2])])
    with running("triton", "cpu"):
        sites = plan_sites(corner, shape, batch, [WINDOWS[0]])
        outputs, rules = sites.strided_rules(WINDOWS[0])
        assert sites.submanifold_rules((3, 3, 3)).table.sum(dim=0).tolist() == [4] * 12 + [2, 1, 3] + [4] * 12
    assert ravel(outputs.coords, outputs.shape).diff().gt(0).all()
    assert (rules.table < 2).any(dim=1).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_plan_waits_for_the_gpu_once() -> None:
    coords = random_coords(3, 500, (40, 40, 21), 2).cuda()

    def prepare() -> None:
        sites = plan_sites(coords, (40, 40, 21), 2, WINDOWS[:3])
        rules = [sites.submanifold_rules((3, 3, 3))]
        for window in WINDOWS[:3]:
            sites, strided = sites.strided_rules(window)
            rules += [strided, strided.transposed()]
        assert all(len(each.tiles.order) for each in rules)

    prepare()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            prepare()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert sum("synchronizing CUDA operation" in str(warning.message) for warning in seen) == 1
