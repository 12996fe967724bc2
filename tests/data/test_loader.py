from __future__ import annotations

import dataclasses
import gc
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bevctl.batch import Batch
from bevctl.config.schema import Config
from bevctl.data.loader import EpochSampler, Reshuffle, collate, make_loader
from bevctl.data.nuscenes import Item, NuScenesDataset
from tests.data.samples import random_sample
from tests.data.sets import write_set

SIZES = st.fixed_dictionaries(
    {
        "length": st.integers(1, 60),
        "batch": st.integers(1, 8),
        "world": st.integers(1, 5),
        "epoch": st.integers(0, 3),
        "drop_last": st.booleans(),
    }
)


def _batches(rank: int, shuffle: bool, start_batch: int = 0, **size: int) -> list[list[tuple[int, int]]]:
    sampler = EpochSampler(**size, rank=rank, shuffle=shuffle, start_batch=start_batch)  # type: ignore[arg-type]
    batches = list(sampler)
    assert len(batches) == len(sampler)
    return batches


@given(size=SIZES)
def test_ranks_share_an_epoch_evenly(size: dict[str, int]) -> None:
    ranks = [_batches(rank, True, **size) for rank in range(size["world"])]
    assert {len(batch) for batches in ranks for batch in batches} == {size["batch"]}
    assert len({len(batches) for batches in ranks}) == 1
    drawn = [index for batches in ranks for batch in batches for _, index in batch]
    whole, rest = divmod(len(drawn), size["length"])
    counts = np.bincount(drawn, minlength=size["length"])
    assert set(counts) <= {whole, whole + 1}
    if size["drop_last"] and len(drawn) > size["length"]:
        assert len(ranks[0]) == 1
    if not size["drop_last"]:
        assert counts.min() >= 1
    assert rest == 0 or counts.sum() == len(drawn)


@given(size=SIZES)
def test_evaluation_sees_each_sample_once(size: dict[str, int]) -> None:
    size = {**size, "drop_last": False}
    ranks = [_batches(rank, False, **size) for rank in range(size["world"])]
    assert len({len(batches) for batches in ranks}) == 1
    drawn = sorted(index for batches in ranks for batch in batches for _, index in batch)
    assert drawn == list(range(size["length"]))


@given(size=SIZES, shares=st.lists(st.floats(0, 1), min_size=1, max_size=3))
def test_reshuffling_changes_the_order_of_what_is_left_and_nothing_else(
    size: dict[str, int], shares: list[float]
) -> None:
    ranks = [_batches(rank, True, **size) for rank in range(size["world"])]
    first = min(int(share * len(ranks[0])) for share in shares)
    changes = tuple(
        Reshuffle(size["epoch"], int(share * len(ranks[0])), number) for number, share in enumerate(shares, start=1)
    )
    others = [list(EpochSampler(**size, rank=rank, reshuffles=changes)) for rank in range(size["world"])]  # type: ignore[arg-type]
    assert [batches[:first] for batches in others] == [batches[:first] for batches in ranks]
    drawn = [sorted(itertools.chain(*itertools.chain(*batches))) for batches in (others, ranks)]
    assert drawn[0] == drawn[1]
    elsewhere = tuple(change._replace(epoch=size["epoch"] + 1) for change in changes)
    assert list(EpochSampler(**size, reshuffles=elsewhere)) == ranks[0]  # type: ignore[arg-type]


def test_each_reshuffle_is_another_order() -> None:
    orders = [list(EpochSampler(40, 2, reshuffles=(Reshuffle(0, 4, number),))) for number in range(1, 4)]
    orders.append(list(EpochSampler(40, 2)))
    assert all(a[:4] == b[:4] and a != b for a, b in itertools.combinations(orders, 2))


@given(size=SIZES, share=st.floats(0, 1))
def test_a_later_start_gives_the_rest_of_the_epoch(size: dict[str, int], share: float) -> None:
    whole = _batches(0, True, **size)
    start = int(share * len(whole))
    assert _batches(0, True, start, **size) == whole[start:]


def test_the_order_depends_on_seed_and_epoch() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return [index for batch in EpochSampler(50, 5, seed=seed, epoch=epoch) for _, index in batch]

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)
    assert sorted(order(0, 0)) == list(range(50))


def test_one_step_sees_the_same_samples_on_any_number_of_ranks() -> None:
    alone = [set(batch) for batch in EpochSampler(48, 8)]
    shared = [list(EpochSampler(48, 2, rank=rank, world=4)) for rank in range(4)]
    assert [set().union(*step) for step in zip(*shared, strict=True)] == alone


def test_one_sample_fills_a_batch() -> None:
    assert list(EpochSampler(1, 4, epoch=2)) == [[(2, 0)] * 4]


@pytest.mark.parametrize("wrong", [{"length": 0}, {"batch": 0}, {"rank": 2, "world": 2}, {"start_batch": -1}])
def test_impossible_numbers_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="impossible"):
        EpochSampler(**{"length": 3, "batch": 1, **wrong})  # type: ignore[arg-type]


def test_collating_stacks_and_keeps_the_contract() -> None:
    samples = [random_sample(0), dataclasses.replace(random_sample(1), bev_map=np.ones((6, 5, 4), np.uint8))]
    batch = collate([Item(samples[0]), Item(None, ("bad file",)), Item(samples[1])])
    assert batch.size == 2
    assert batch.images is not None
    assert batch.points is not None
    assert batch.bev_map is not None
    assert (batch.images.shape, batch.images.dtype) == ((2, 2, 3, 90, 160), torch.uint8)
    assert samples[1].images is not None
    assert batch.images[1, 0, :, 3, 7].tolist() == samples[1].images[0][3, 7].tolist()
    assert [tuple(points.shape) for points in batch.points] == [(400, 5)] * 2
    assert [labels.dtype for labels in batch.labels] == [torch.int64] * 2
    assert batch.has_boxes.tolist() == [True, True]
    assert batch.has_map.tolist() == [False, True]
    assert batch.bev_map.mean(dim=(1, 2, 3)).tolist() == [0.0, 1.0]
    assert batch.tokens == ["sample-0", "sample-1"]
    assert batch.problems == ["bad file"]
    point = torch.tensor([1.0, 5.0, -0.5, 1.0])
    c = batch.calibration
    through = c.intrinsics[1, 0] @ torch.linalg.inv(c.camera2lidar[1, 0]) @ point
    torch.testing.assert_close(c.lidar2image[1, 0] @ point, through, rtol=1e-4, atol=1e-3)
    assert all(getattr(c, f.name).dtype == torch.float32 for f in dataclasses.fields(c))


def test_nothing_left_is_an_empty_batch() -> None:
    batch = collate([Item(None, ("a",)), Item(None, ("b",))])
    assert (batch.size, batch.problems) == (0, ["a", "b"])
    assert batch.calibration.lidar_aug.shape == (0, 4, 4)
    assert batch.images is None


@pytest.fixture
def config(tmp_path: Path, jpeg: bytes) -> Config:
    return write_set(tmp_path, jpeg, count=7)


def _load(config: Config, workers: int, start_batch: int = 0) -> list[Batch]:
    dataset = NuScenesDataset(config, "train")
    loader = make_loader(dataset, EpochSampler(len(dataset), 2, epoch=1, start_batch=start_batch), workers=workers)
    batches: list[Batch] = list(loader)
    assert len(batches) == len(loader)
    return batches


def _assert_same(first: Batch, second: Batch) -> None:
    assert first.tokens == second.tokens
    torch.testing.assert_close(first.images, second.images, rtol=0, atol=0)
    torch.testing.assert_close(first.points, second.points, rtol=0, atol=0)
    torch.testing.assert_close(first.calibration.lidar_aug, second.calibration.lidar_aug, rtol=0, atol=0)


def test_workers_change_nothing_and_touch_no_global_state(config: Config) -> None:
    state = torch.get_rng_state()
    alone, helped = _load(config, 0), _load(config, 2)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(alone) == 3
    for first, second in zip(alone, helped, strict=True):
        _assert_same(first, second)
    (last,) = _load(config, 0, start_batch=2)
    _assert_same(last, alone[2])


class _Counting:
    """Batches are the number of objects that the collector of garbage does not look at."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: tuple[int, int]) -> int:
        return gc.get_freeze_count()

    @staticmethod
    def collate(items: Sequence[int]) -> int:
        return items[0]


def test_workers_look_for_no_garbage_in_what_they_share() -> None:
    """Looking touches every annotation of a set, which makes each worker copy the memory that they lie in."""
    before = gc.get_freeze_count()
    counts = [list(make_loader(_Counting(), EpochSampler(4, 2), workers=workers)) for workers in (0, 1)]  # type: ignore[arg-type]
    assert counts[0] == [before, before]
    assert min(counts[1]) > before + 10_000


PARENT = """
import sys, time
from pathlib import Path
from tests.data.sets import config_for
from bevctl.data.loader import EpochSampler, make_loader
from bevctl.data.nuscenes import NuScenesDataset

dataset = NuScenesDataset(config_for(Path(sys.argv[1]), "infos.pkl"), "train")
batches = iter(make_loader(dataset, EpochSampler(len(dataset), 1), workers=2))
print(*[worker.pid for worker in batches._workers], flush=True)
sys.stdin.readline()
print(len(list(batches)), flush=True)
sys.stdin.readline()
"""


@contextmanager
def _parent_with_workers(config: Config) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A process that loads with two workers, and their ids as soon as they are started; none is left behind."""
    command = [sys.executable, "-c", PARENT, config.data.root]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    workers: list[int] = []
    with subprocess.Popen(command, text=True, **streams) as parent:  # type: ignore[call-overload]
        try:
            workers += map(int, parent.stdout.readline().split())
            assert len(workers) == 2
            yield parent, workers
        finally:
            parent.kill()
            for pid in workers:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _alive(pid: int) -> bool:
    """A zombie counts as gone: whoever adopted it just has not asked yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def _wait_until_gone(pids: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(_alive, pids))


linux_only = pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")


@linux_only
def test_workers_ignore_signals_from_elsewhere_but_do_not_outlive_their_parent(config: Config) -> None:
    with _parent_with_workers(config) as (parent, workers):
        for pid in workers * 2:  # at once: they may not even have started
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
        assert parent.stdin is not None
        assert parent.stdout is not None
        parent.stdin.write("\n")
        parent.stdin.flush()
        assert parent.stdout.readline().strip() == "7"
    # torch's own watch would take up to five seconds
    with _parent_with_workers(config) as (parent, workers):
        time.sleep(0.5)
        assert all(map(_alive, workers))
        parent.kill()
        assert _wait_until_gone(workers, 3.0)


@linux_only
@pytest.mark.parametrize("how", ["worker killed", "error in the parent"])
def test_a_parent_that_fails_is_not_held_up_by_its_workers(config: Config, how: str) -> None:
    with _parent_with_workers(config) as (parent, workers):
        if how == "worker killed":
            os.kill(workers[1], signal.SIGKILL)
        else:
            parent.send_signal(signal.SIGINT)
        assert parent.stdin is not None
        parent.stdin.close()
        parent.wait(timeout=20)
        assert _wait_until_gone(workers, 3.0)
